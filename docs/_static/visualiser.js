// Draws the steps that traces.js computes.

(() => {
  "use strict";

  const { algorithms, longest, traceOf } = window.traces;
  const root = document.getElementById("visualiser");
  const find = (selector) => root.querySelector(selector);
  const form = find("form");
  const NAMES = ["algorithm", "mask"];
  const NUMBERS = ["size", "M", "N", "B_r", "B_c"];
  const SIZES = { window: "Keys of the window", documents: "Documents", blocks: "Block size" };
  const CELL = 10; // units of the drawing
  const BYTES = 4; // of a number, as if in float32

  let algorithm; // its code, its fields
  let run; // its tiles and steps for the chosen sizes
  let state; // what the steps so far have left
  let drawing; // elements of the score matrix
  let selected = Infinity; // row; at first the last one, whose numbers change longest
  let timer = null;

  // The state after a step

  function empty() {
    return { step: -1, scored: new Set(), values: run.visible.map(() => ({})) };
  }

  function advance() {
    state.step += 1;
    const { corner, isScore, shown } = run.steps[state.step];
    if (isScore) state.scored.add(corner ? `${corner}` : "all");
    for (const [row, field, value] of shown) state.values[row][field] = value;
  }

  function goTo(number) {
    if (number < state.step) state = empty();
    while (state.step < number) advance();
  }

  // The largest difference between the result so far and the definition's.
  function difference() {
    let largest = 0;
    run.reference.forEach((numbers, row) => {
      const found = state.values[row][algorithm.result] ?? [];
      numbers.forEach((x, n) => {
        const apart = Math.abs(x - found[n]);
        largest = Math.max(largest, Number.isNaN(apart) ? Infinity : apart);
      });
    });
    return largest;
  }

  // Text

  const SYMBOLS = { delta: "δ", l: "ℓ" };

  function named(name) {
    const [symbol, index] = name.split("_");
    const element = document.createElement("var");
    element.textContent = SYMBOLS[symbol] ?? symbol;
    if (index) element.append(Object.assign(document.createElement("sub"), { textContent: index }));
    return element;
  }

  function written(x) {
    if (x === undefined) return "–";
    if (Array.isArray(x)) return x.map(written).join("  ");
    if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x < 0 ? "−∞" : "∞";
    return x.toFixed(3).replace("-", "−");
  }

  const counted = (n) => n.toLocaleString("en-US");

  // Drawing

  function svg(name, attributes, parent) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent?.append(element);
    return element;
  }

  function drawScores() {
    const picture = find(".v-scores svg");
    picture.replaceChildren();
    const M = run.visible.length;
    const N = run.visible[0].length;
    const [width, height] = [Math.max(N, 3) * CELL, Math.max(M, 4) * CELL]; // room for the names
    picture.setAttribute("viewBox", `-14 -14 ${width + 19} ${height + 16}`);
    const hatch = svg("pattern", { id: "v-hatch", width: 4, height: 4, patternUnits: "userSpaceOnUse" });
    svg("path", { d: "M0,4 L4,0", class: "v-hatch" }, hatch);
    picture.append(hatch);
    svg("text", { x: 0, y: -5, class: "v-axis" }, picture).textContent = "keys →";
    svg("text", { x: -height, y: -5, class: "v-axis", transform: "rotate(-90)" }, picture)
      .textContent = "← queries";
    const cells = [];
    for (let m = 0; m < M; m++) {
      cells.push([]);
      const heaviest = Math.max(...run.weights[m]) || 1;
      for (let n = 0; n < N; n++) {
        const hidden = !run.visible[m][n];
        const cell = svg("rect", { x: n * CELL, y: m * CELL, width: CELL, height: CELL }, picture);
        cell.setAttribute("class", hidden ? "v-cell v-hidden" : "v-cell");
        cell.style.setProperty("--weight", 0.15 + 0.85 * (run.weights[m][n] / heaviest));
        cell.addEventListener("click", () => select(m));
        cells[m].push(cell);
      }
    }
    const tiles = {};
    run.rows.slice(0, -1).forEach((i, r) => {
      run.cols.slice(0, -1).forEach((j, c) => {
        tiles[`${i},${j}`] = svg("rect", {
          x: j * CELL, y: i * CELL,
          width: (run.cols[c + 1] - j) * CELL, height: (run.rows[r + 1] - i) * CELL,
          class: `v-tile v-${run.kinds[r][c]}`,
        }, picture);
      });
    });
    const row = svg("rect", { x: -3, width: N * CELL + 6, height: CELL, class: "v-selected" }, picture);
    const active = svg("rect", { class: "v-active" }, picture);
    drawing = { cells, tiles, row, active };
  }

  function renderScores(step) {
    for (const [corner, tile] of Object.entries(drawing.tiles)) {
      const scored = state.scored.has(corner) || state.scored.has("all");
      tile.classList.toggle("v-scored", scored);
    }
    const done = (m, n) => {
      const i = run.rows.findLast((start) => start <= m);
      const j = run.cols.findLast((start) => start <= n);
      return state.scored.has("all") || state.scored.has(`${i},${j}`);
    };
    drawing.cells.forEach((line, m) => {
      line.forEach((cell, n) => cell.classList.toggle("v-done", done(m, n)));
    });
    drawing.row.setAttribute("y", selected * CELL);
    const tile = drawing.tiles[`${step.corner}`];
    drawing.active.style.display = tile ? "" : "none";
    for (const name of tile ? ["x", "y", "width", "height"] : []) {
      drawing.active.setAttribute(name, tile.getAttribute(name));
    }
  }

  const rowsOf = (x) => (x.shape.length === 1 ? x.data.map((number) => [number]) : x.tolist());

  // A square for each number: its colour is the sign, its strength the size.
  function drawNumbers(rows) {
    const [height, width] = [rows.length, rows[0].length];
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}` });
    picture.style.width = `${0.7 * width}rem`;
    const largest = Math.max(...rows.flat().filter(Number.isFinite).map(Math.abs), 1e-9);
    rows.forEach((numbers, y) => numbers.forEach((x, n) => {
      const sign = Number.isFinite(x) ? (x < 0 ? "v-negative" : "v-positive") : "v-infinite";
      const square = svg("rect", { x: n, y, width: 1, height: 1, class: sign }, picture);
      if (Number.isFinite(x)) square.style.fillOpacity = Math.abs(x) / largest;
    }));
    return picture;
  }

  function renderMemory(step) {
    const blocks = step.memory.map(([name, numbers]) => {
      const rows = rowsOf(numbers);
      const block = document.createElement("figure");
      const caption = document.createElement("figcaption");
      caption.append(named(name), ` ${rows.length} × ${rows[0].length}`);
      block.append(drawNumbers(rows), caption);
      block.title = rows.map(written).join("\n");
      return block;
    });
    find(".v-blocks").replaceChildren(...blocks);
    const held = step.memory.reduce((sum, [, numbers]) => sum + numbers.data.length, 0);
    find(".v-held").textContent = blocks.length
      ? `${counted(held)} numbers`
      : "nothing: what is needed later is in slow memory";
  }

  function renderMoved(step) {
    const total = run.steps.at(-1).moved;
    const most = Math.max(total, run.standard);
    const show = (part, moved) => {
      find(`.v-${part} .v-bar`).style.width = `${(100 * moved) / most}%`;
      find(`.v-${part} .v-count`).textContent = `${counted(BYTES * moved)} bytes`;
    };
    show("own", step.moved);
    show("standard", run.standard);
  }

  function renderRow() {
    const rows = Object.keys(algorithm.fields).map((name) => {
      const line = document.createElement("tr");
      const head = document.createElement("th");
      head.scope = "row";
      head.append(named(name));
      const cell = document.createElement("td");
      cell.textContent = written(state.values[selected][name]);
      line.append(head, cell);
      return line;
    });
    find(".v-row tbody").replaceChildren(...rows);
    form.elements.row.value = selected;
  }

  function renderCode(step) {
    const listing = find(".v-code pre");
    listing.querySelector(".v-current")?.classList.remove("v-current");
    const line = listing.querySelector(`[data-line="${step.line}"]`);
    line.classList.add("v-current");
    const middle = line.offsetTop - listing.offsetTop - listing.clientHeight / 2;
    listing.scrollTop = Math.max(0, middle);
  }

  function render() {
    const step = run.steps[state.step];
    const last = run.steps.length - 1;
    renderScores(step);
    renderMemory(step);
    renderMoved(step);
    renderRow();
    renderCode(step);
    form.elements.step.value = state.step;
    const position = `step ${counted(state.step + 1)} of ${counted(last + 1)}`;
    find(".v-position").textContent = step.loops ? `${position}; ${step.loops}` : position;
    const verdict = find(".v-verdict");
    const apart = state.step === last ? difference() : null;
    verdict.textContent = apart === null
      ? ""
      : "Finished. The result is that of the definition, up to rounding: "
        + `the largest difference is ${apart ? apart.toExponential(0) : 0}.`;
    root.dataset.finished = apart === null ? "" : String(apart);
  }

  // Choosing and playing

  function choose(choice) {
    pause();
    const { elements } = form;
    for (const name of NAMES) {
      const known = [...elements[name].options].some((x) => x.value === choice[name]);
      if (known) elements[name].value = choice[name]; // an address may hold anything
    }
    const chosen = { algorithm: elements.algorithm.value, mask: elements.mask.value };
    for (const name of NUMBERS) {
      const number = Math.trunc(choice[name] ?? elements[name].value) || 1;
      chosen[name] = elements[name].value = Math.max(1, Math.min(number, longest));
    }
    const sides = elements.algorithm.selectedOptions[0].dataset.tile;
    for (const name of ["B_r", "B_c"]) elements[name].parentElement.hidden = !sides.includes(name);
    elements.size.parentElement.hidden = !(chosen.mask in SIZES);
    find(".v-size").textContent = SIZES[chosen.mask];
    algorithm = algorithms[chosen.algorithm];
    run = traceOf(chosen);
    selected = within(choice.row ?? selected, run.visible.length);
    state = empty();
    const rows = run.visible.map((_, row) => new Option(String(row), row));
    elements.row.replaceChildren(...rows);
    elements.step.max = run.steps.length - 1;
    find(".v-file").textContent = algorithm.file;
    find(".v-own .v-what").textContent = algorithm.title;
    find(".v-standard .v-what").textContent = `${algorithm.compared}, in all`;
    const lines = algorithm.code.map((text, number) => {
      const line = document.createElement("span");
      line.dataset.line = number;
      line.textContent = `${text}\n`;
      return line;
    });
    find(".v-code pre").replaceChildren(...lines.filter((line) => line.textContent.trim()));
    drawScores();
    show(choice.step ?? 0);
  }

  const within = (x, count) => Math.max(0, Math.min(Math.trunc(x) || 0, count - 1));

  function show(number) {
    goTo(within(number, run.steps.length));
    render();
  }

  function select(row) {
    selected = within(row, run.visible.length);
    render();
  }

  function nextTile(direction) {
    const corner = (n) => `${run.steps[n].corner}`;
    let number = state.step;
    const inside = (n) => n > 0 && n < run.steps.length - 1;
    do number += direction; while (inside(number) && (
      corner(number) === corner(state.step) || !run.steps[number].corner
    ));
    show(number);
  }

  function pause() {
    clearTimeout(timer);
    timer = null;
    find("[data-do=play]").textContent = "Play";
  }

  function play() {
    if (state.step === run.steps.length - 1) show(0);
    find("[data-do=play]").textContent = "Pause";
    const tick = () => {
      show(state.step + 1);
      if (state.step === run.steps.length - 1) pause();
      else timer = setTimeout(tick, 1000 / Number(form.elements.speed.value));
    };
    timer = setTimeout(tick, 0);
  }

  const COMMANDS = {
    first: () => show(0),
    back: () => show(state.step - 1),
    play: () => (timer === null ? play() : pause()),
    step: () => show(state.step + 1),
    tile: () => nextTile(1),
  };
  const KEYS = {
    " ": COMMANDS.play,
    ArrowLeft: COMMANDS.back,
    ArrowRight: COMMANDS.step,
    ArrowUp: () => select(selected - 1),
    ArrowDown: () => select(selected + 1),
    PageUp: () => nextTile(-1),
    PageDown: COMMANDS.tile,
    Home: COMMANDS.first,
    End: () => show(run.steps.length - 1),
  };

  function fromAddress() {
    const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    const speeds = [...form.elements.speed.options].map((x) => x.value);
    if (speeds.includes(given.speed)) form.elements.speed.value = given.speed;
    return given;
  }

  function open(given) {
    choose(given);
    if (given.play) play();
  }

  function remember() {
    const chosen = [...NAMES, ...NUMBERS].map((name) => `${name}=${form.elements[name].value}`);
    history.replaceState(null, "", `#${chosen.join("&")}&step=${state.step}&row=${selected}`);
  }

  const { preset } = form.elements;
  for (const name of [...NAMES, ...NUMBERS]) {
    form.elements[name].addEventListener("change", () => {
      preset.value = "";
      choose({});
      remember();
    });
  }
  preset.addEventListener("change", () => {
    choose({ row: Infinity, ...Object.fromEntries(new URLSearchParams(preset.value)) });
    remember();
  });
  form.elements.row.addEventListener("change", (event) => select(Number(event.target.value)));
  form.elements.step.addEventListener("input", (event) => {
    pause();
    show(Number(event.target.value));
  });
  for (const name of ["row", "step"]) form.elements[name].addEventListener("change", remember);
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const button of root.querySelectorAll("[data-do]")) {
    button.addEventListener("click", () => {
      if (button.dataset.do !== "play") pause();
      COMMANDS[button.dataset.do]();
      if (timer === null) remember();
    });
  }
  root.addEventListener("keydown", (event) => {
    const command = KEYS[event.key];
    const isOthers = event.target.matches("select, input, button") && event.key === " ";
    const isChoice = event.target.matches("select, input[type=number]");
    if (!command || isOthers || isChoice || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (event.key !== " ") pause();
    command();
    if (timer === null) remember();
  });
  window.addEventListener("hashchange", () => {
    const given = fromAddress();
    if (NAMES.some((name) => name in given)) open(given);
  });

  // For the tests.
  window.attentionVisualiser = {
    choose,
    show,
    difference,
    steps: () => run.steps.length,
    presets: [...preset.options].map((x) => x.value).filter((x) => x),
  };
  open(fromAddress());
})();
