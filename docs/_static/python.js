// Runs the syntax trees of the lessons' functions, line by line. docs/traces.py writes the trees; it
// knows only the Python that the lessons use, and says so when it meets more.

window.python = (() => {
  "use strict";

  const { Tensor, count, elementwise, torch } = window.tensors;
  const { constants, functions } = window.lessons;

  const BUILTINS = {
    torch,
    ceil: Math.ceil,
    sqrt: Math.sqrt,
    int: Math.trunc,
    float: () => Infinity,
    len: (x) => (x instanceof Tensor ? x.shape[0] : x.length),
    max: (...numbers) => Math.max(...numbers),
    min: (...numbers) => Math.min(...numbers),
    pairwise: (items) => items.slice(1).map((x, n) => [items[n], x]),
    range: (...bounds) => (bounds.length === 1 ? count(0, ...bounds) : count(...bounds)),
    slice: (start, stop) => ({ start, stop }),
    INFINITY: Infinity,
    ...constants,
    ...functions,
  };

  const OPERATORS = {
    Add: (a, b) => a + b,
    Sub: (a, b) => a - b,
    Mult: (a, b) => a * b,
    Div: (a, b) => a / b,
    FloorDiv: (a, b) => Math.floor(a / b),
    Mod: (a, b) => a - b * Math.floor(a / b),
    BitAnd: (a, b) => a && b,
    BitOr: (a, b) => a || b,
    Eq: (a, b) => a === b,
    Lt: (a, b) => a < b,
    LtE: (a, b) => a <= b,
    Gt: (a, b) => a > b,
    USub: (a) => -a,
    Invert: (a) => !a,
  };
  const OTHERS = {
    MatMult: (a, b) => a.matmul(b),
    Is: (a, b) => a === b,
    IsNot: (a, b) => a !== b,
    In: (a, b) => b.includes(a),
    Not: (a) => !a,
  };

  function operate(name, ...given) {
    if (name in OTHERS) return OTHERS[name](...given);
    const f = known(OPERATORS, name);
    return given.some((x) => x instanceof Tensor) ? elementwise(f, ...given) : f(...given);
  }

  function known(table, name) {
    if (name in table) return table[name];
    throw new Error(`the lessons use ${name}, which python.js does not know`);
  }

  // Expressions

  const EXPRESSIONS = {
    Constant: ({ value }) => value ?? null,
    Name: ({ id }, scope) => (id in scope ? scope[id] : known(BUILTINS, id)),
    Tuple: ({ elts }, scope) => listed(elts, scope),
    List: ({ elts }, scope) => listed(elts, scope),
    BinOp: ({ left, op, right }, scope) => operate(op.is, value(left, scope), value(right, scope)),
    UnaryOp: ({ op, operand }, scope) => operate(op.is, value(operand, scope)),
    Compare: ({ left, ops, comparators }, scope) => (
      operate(ops[0].is, value(left, scope), value(comparators[0], scope))
    ),
    BoolOp: ({ op, values }, scope) => (
      op.is === "And" ? values.every((x) => value(x, scope)) : values.some((x) => value(x, scope))
    ),
    IfExp: ({ test, body, orelse }, scope) => value(value(test, scope) ? body : orelse, scope),
    Lambda: ({ args, body }, scope) => (...given) => {
      const names = args.args.map((x) => x.arg);
      return value(body, { ...scope, ...Object.fromEntries(names.map((x, n) => [x, given[n]])) });
    },
    GeneratorExp: ({ elt, generators: [{ target, iter }] }, scope) => (
      items(value(iter, scope)).map((x) => {
        const inner = { ...scope };
        assign(target, x, inner);
        return value(elt, inner);
      })
    ),
    ListComp: (node, scope) => EXPRESSIONS.GeneratorExp(node, scope),
    Slice: ({ lower, upper }, scope) => ({
      start: lower && value(lower, scope), stop: upper && value(upper, scope),
    }),
    Subscript: ({ value: of, slice }, scope) => {
      const [found, key] = [value(of, scope), value(slice, scope)];
      if (found instanceof Tensor) return found.get(...keysOf(slice, key));
      return typeof key === "number" ? found.at(key) : found.slice(key.start, key.stop);
    },
    Attribute: ({ value: of, attr }, scope) => {
      const found = value(of, scope);
      const name = Array.isArray(found) && attr === "append" ? "push" : attr;
      if (found[name] === undefined) return known({}, attr);
      return typeof found[name] === "function" ? found[name].bind(found) : found[name];
    },
    Call: ({ func, args, keywords }, scope) => {
      const named = Object.fromEntries(keywords.map((x) => [x.arg, value(x.value, scope)]));
      return call(value(func, scope), listed(args, scope), named);
    },
  };

  const value = (node, scope) => known(EXPRESSIONS, node.is)(node, scope);
  const items = (x) => (x instanceof Tensor ? x.tolist() : x);
  const keysOf = (slice, key) => (slice.is === "Tuple" ? key : [key]);
  const listed = (nodes, scope) => nodes.flatMap((x) => (
    x.is === "Starred" ? value(x.value, scope) : [value(x, scope)]
  ));

  function assign(target, x, scope) {
    if (target.is === "Name") scope[target.id] = x;
    else if (target.is === "Tuple") target.elts.forEach((part, n) => assign(part, items(x)[n], scope));
    else {
      const key = value(target.slice, scope);
      value(target.value, scope).set(x, ...keysOf(target.slice, key));
    }
  }

  // Statements: each yields its line when it has done its work

  const CONTINUE = {};

  const STATEMENTS = {
    * Assign({ targets, value: of, line }, scope) {
      assign(targets[0], value(of, scope), scope);
      yield line;
    },
    * AugAssign({ target, op, value: of, line }, scope) {
      assign(target, operate(op.is, value(target, scope), value(of, scope)), scope);
      yield line;
    },
    * Expr({ value: of, line }, scope) {
      value(of, scope);
      yield line;
    },
    * If({ test, body, orelse, line }, scope) {
      const holds = value(test, scope);
      yield line;
      return yield* execute(holds ? body : orelse, scope);
    },
    * For({ target, iter, body, line }, scope) {
      for (const x of items(value(iter, scope))) {
        assign(target, x, scope);
        yield line;
        const done = yield* execute(body, scope);
        if (done && done !== CONTINUE) return done;
      }
      yield line; // which finds nothing more
    },
    * Continue({ line }) {
      yield line;
      return CONTINUE;
    },
    * Return({ value: of, line }, scope) {
      const result = value(of, scope);
      yield line;
      return { result };
    },
  };

  function* execute(body, scope) {
    for (const statement of body) {
      const done = yield* known(STATEMENTS, statement.is)(statement, scope);
      if (done) return done;
    }
  }

  function scopeOf(f, given, named) {
    const scope = { ...named };
    f.names.forEach((name, n) => {
      if (n < given.length) scope[name] = given[n];
      else if (!(name in scope)) scope[name] = value(f.defaults[name], {});
    });
    return scope;
  }

  // The result of a function of the lessons, or of one in JavaScript.
  function call(f, given, named = {}) {
    if (typeof f === "function") return f(...given, ...(Object.keys(named).length ? [named] : []));
    const lines = execute(f.body, scopeOf(f, given, named));
    for (;;) {
      const { done, value: last } = lines.next();
      if (done) return last.result;
    }
  }

  // The lines of a call as they run, each with the variables after it, which go on to change.
  function* run(f, given) {
    const scope = scopeOf(f, given, {});
    for (const line of execute(f.body, scope)) yield [line, scope];
  }

  return { value, run, call: (name, ...given) => call(functions[name], given) };
})();
