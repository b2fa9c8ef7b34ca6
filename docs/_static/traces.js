// What the player draws: the steps of an algorithm, as docs/traces.py describes them.

window.traces = (() => {
  "use strict";

  const { Tensor, count } = window.tensors;
  const { value, run, call } = window.python;
  const { algorithms, constants, inputs, longest } = window.lessons;

  // What the arguments of an algorithm are made of, by name.
  function problemOf({ algorithm, mask, size, M, N, ...tile }) {
    const [B_r, B_c] = call("tile_sizes", algorithm, tile.B_r, tile.B_c);
    const rows = (name, n) => Tensor.from(inputs[name].slice(0, n));
    const [Q, K, V, dO] = [rows("Q", M), rows("K", N), rows("V", N), rows("dO", M)];
    const visible = call("visible_keys", mask, M, N, size);
    const [O, L, P, dQ, dK, dV] = call("definition", Q, K, V, dO, visible);
    return { ...constants, Q, K, V, dO, visible, mask, B_r, B_c, O, L, P, dQ, dK, dV };
  }

  // Every line that the algorithm runs on a problem.
  function* stepsOf(algorithm, problem) {
    const [M, N] = problem.visible.shape;
    const tile = {};
    const memory = new Map();
    let moved = 0;
    for (const [line, variables] of run(algorithm.function, value(algorithm.arguments, problem))) {
      const [sides, does] = algorithm.actions[line] ?? [[], []];
      const shown = [];
      let isScore = false;
      for (const side of sides) {
        if (side === algorithm.outer) delete tile[side === "rows" ? "cols" : "rows"];
        tile[side] = positions(variables[side], side === "rows" ? M : N);
      }
      const [rows, cols] = [tile.rows ?? count(0, M), tile.cols ?? count(0, N)];
      for (const [verb, ...names] of does) {
        if (verb === "free" && !names.length) memory.clear();
        isScore ||= verb === "score";
        for (const name of names) {
          if (verb === "load" || verb === "make") {
            memory.set(name, value(algorithm.blocks[name], variables).clone());
          }
          if (verb === "free") memory.delete(name);
          else if (verb === "show") {
            const { value: field, where } = algorithm.fields[name];
            const numbers = value(field, variables).tolist();
            const numbered = where === "tile" ? rows : count(0, M);
            numbered.forEach((row, n) => shown.push([row, name, numbers[n]]));
          } else if (verb !== "make" && memory.has(name)) moved += memory.get(name).data.length;
        }
      }
      const isPlaced = tile.cols && (tile.rows || !algorithm.outer) && rows.length && cols.length;
      const loops = ["step", "rank", "i", "j"].filter((x) => Number.isInteger(variables[x]));
      yield {
        line,
        corner: isPlaced ? [rows[0], cols[0]] : null,
        moved,
        memory: [...memory],
        loops: loops.map((x) => `${x} = ${variables[x]}`).join(", "),
        isScore,
        shown,
      };
    }
  }

  function positions(indices, length) {
    if (indices instanceof Tensor) return indices.data;
    return count(0, length).slice(indices.start, indices.stop);
  }

  // One algorithm on one problem, with what is drawn from the start.
  function traceOf(choice) {
    const algorithm = algorithms[choice.algorithm];
    const problem = problemOf(choice);
    const { visible, B_r, B_c, P } = problem;
    const [rows, cols] = call("edges", choice.algorithm, choice.M, choice.N, B_r, B_c);
    return {
      rows,
      cols,
      kinds: call("kinds", visible, rows, cols),
      visible: visible.tolist(),
      weights: P.tolist(),
      reference: problem[algorithm.result].tolist(),
      standard: call("standard_traffic", choice.algorithm, choice.M, choice.N),
      steps: [...stepsOf(algorithm, problem)],
    };
  }

  return { algorithms, longest, traceOf };
})();
