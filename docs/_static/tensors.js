// Matrices and vectors with the names and the meaning of PyTorch's, as far as the lessons use them.

window.tensors = (() => {
  "use strict";

  class Tensor {
    constructor(shape, data) {
      this.shape = shape;
      this.data = data; // row after row
    }

    // The value of `f` at every index.
    static build(shape, f) {
      const indices = shape.reduce(
        (found, n) => found.flatMap((index) => count(0, n).map((i) => [...index, i])), [[]],
      );
      return new Tensor(shape, indices.map(f));
    }

    static from(rows) {
      return Array.isArray(rows[0])
        ? new Tensor([rows.length, rows[0].length], rows.flat())
        : new Tensor([rows.length], rows);
    }

    tolist() {
      if (this.shape.length === 1) return this.data;
      const [rows, columns] = this.shape;
      return count(0, rows).map((i) => this.data.slice(i * columns, (i + 1) * columns));
    }

    clone() {
      return new Tensor(this.shape, [...this.data]);
    }

    // Indices: a slice, a list of numbers as a tensor, a number, or null for a new axis.

    picked(keys) {
      const shape = [];
      let offsets = [0];
      let axis = 0;
      const all = { start: 0 };
      for (const key of [...keys, ...Array(this.shape.length).fill(all)]) {
        if (key === null) shape.push(1);
        else if (axis < this.shape.length) {
          const n = this.shape[axis++];
          const chosen = positions(key, n);
          offsets = offsets.flatMap((offset) => chosen.map((i) => offset * n + i));
          if (typeof key !== "number") shape.push(chosen.length);
        }
      }
      return { shape, offsets };
    }

    get(...keys) {
      const { shape, offsets } = this.picked(keys);
      const data = offsets.map((offset) => this.data[offset]);
      return shape.length ? new Tensor(shape, data) : data[0];
    }

    set(value, ...keys) {
      const { shape, offsets } = this.picked(keys);
      const values = spread(value, shape).data;
      offsets.forEach((offset, n) => { this.data[offset] = values[n]; });
    }

    // Shapes

    get T() {
      const [rows, columns] = this.shape;
      return Tensor.build([columns, rows], ([i, j]) => this.data[j * columns + i]);
    }

    expand(...shape) { return spread(this, shape); }
    squeeze(axis) { return new Tensor(this.shape.filter((_, n) => n !== axis), this.data); }

    tensor_split(parts) {
      const [share, more] = [Math.floor(this.data.length / parts), this.data.length % parts];
      const begin = (part) => share * part + Math.min(part, more);
      return count(0, parts).map((n) => this.get({ start: begin(n), stop: begin(n + 1) }));
    }

    // Reductions; those of an axis are along the rows of a matrix

    alongRows(f, { keepdim = false } = {}) {
      const data = this.tolist().map((row) => row.reduce(f));
      return new Tensor(keepdim ? [data.length, 1] : [data.length], data);
    }

    sum(axis, options) { return this.alongRows((a, b) => a + b, options); }
    amax(axis, options) { return this.alongRows((a, b) => Math.max(a, b), options); }
    any() { return this.data.some((x) => x); }
    all() { return this.data.every((x) => x); }

    // New tensors

    matmul(other) {
      const [[rows, depth], columns] = [this.shape, other.shape[1]];
      return Tensor.build([rows, columns], ([i, j]) => {
        let sum = 0;
        for (let k = 0; k < depth; k++) sum += this.data[i * depth + k] * other.data[k * columns + j];
        return sum;
      });
    }

    masked_fill(mask, value) { return elementwise((x, hidden) => (hidden ? value : x), this, mask); }
    new_full(shape, value) { return Tensor.build(shape, () => value); }
    new_zeros(...shape) { return this.new_full(shape, 0); }
    new_empty(...shape) { return this.new_full(shape, NaN); }
  }

  function count(start, stop, step = 1) {
    const found = [];
    for (let i = start; i < stop; i += step) found.push(i);
    return found;
  }

  function positions(key, n) {
    if (typeof key === "number") return [key < 0 ? key + n : key];
    if (key instanceof Tensor) return key.data;
    return count(key.start ?? 0, Math.min(key.stop ?? n, n));
  }

  // `value` with a shape that it broadcasts to.
  function spread(value, shape) {
    if (!(value instanceof Tensor)) return Tensor.build(shape, () => value);
    const missing = shape.length - value.shape.length;
    return Tensor.build(shape, (index) => value.data[
      value.shape.reduce((offset, n, axis) => offset * n + (n === 1 ? 0 : index[missing + axis]), 0)
    ]);
  }

  function elementwise(f, ...given) {
    const tensors = given.filter((x) => x instanceof Tensor);
    const rank = Math.max(...tensors.map((x) => x.shape.length));
    const shape = count(-rank, 0).map((axis) => {
      const sizes = tensors.map((x) => x.shape.at(axis) ?? 1);
      return sizes.find((n) => n !== 1) ?? 1;
    });
    const operands = given.map((x) => spread(x, shape).data);
    const data = operands[0].map((_, n) => f(...operands.map((x) => x[n])));
    return new Tensor(shape, data);
  }

  function logaddexp(a, b) {
    const m = Math.max(a, b);
    return m === -Infinity ? m : m + Math.log(Math.exp(a - m) + Math.exp(b - m));
  }

  const torch = {
    arange: (...bounds) => Tensor.from(bounds.length === 1 ? count(0, ...bounds) : count(...bounds)),
    zeros_like: (x) => x.new_zeros(...x.shape),
    exp: (x) => elementwise(Math.exp, x),
    log: (x) => elementwise(Math.log, x),
    maximum: (a, b) => elementwise((x, y) => Math.max(x, y), a, b),
    logaddexp: (a, b) => elementwise(logaddexp, a, b),
  };

  return { Tensor, count, elementwise, torch };
})();
