// The tiles of a map: asked for as they come into sight, and the ones used last are kept.
import { bytes, call, floats, galleryPath } from "./api.js";

const KEPT = 40, AT_ONCE = 6, FINEST = 3; // tiles; calls under way; a tile is at least the longer side of the canvas / this

/** -> find(view), the tiles to draw, and clear(). `slots` is which colour a value of `field` has, the rest 8; `changed()`
 * is called when there are more tiles, `fail(error)` when one does not come, `free(tile)` when one is let go.
 * A tile is {points, keys, items}: float32 (n, 3), x, y and colour. A view is {x, y, side, width, height}. */
export function tileStore({ gallery, field, slots, changed, fail, free }) {
  const tiles = new Map(), touched = new Set();
  let waiting = 0, closed = false;

  function ask(zoom, column, row) {
    const name = `${zoom}/${column}/${row}`, tile = tiles.get(name);
    touched.add(name);
    if (!tile && waiting < AT_ONCE) {
      waiting++;
      tiles.set(name, {});
      call("POST", galleryPath(gallery, "/map:tile"), { zoom, column, row, field })
        .then((reply) => tiles.set(name, unpack(reply)), (error) => { tiles.delete(name); if (!closed) fail(error); })
        .finally(() => { waiting--; if (!closed) changed(); });
    } else if (tile) {
      tiles.delete(name); // and in again, as the one used last
      tiles.set(name, tile);
    }
    return tile;
  }

  function unpack({ points, keys = [], values = [], value_of, items = 0 }) {
    const [places, of] = [floats(points), new Uint16Array(bytes(value_of).buffer)], packed = new Float32Array(keys.length * 3);
    const colours = values.map((value) => slots.get(value) ?? 8);
    for (let at = 0; at < keys.length; at++) packed.set([places[2 * at], places[2 * at + 1], colours[of[at]] ?? 8], 3 * at);
    return { points: packed, keys, items: Number(items) };
  }

  /** Find the tiles of a square: the four in it once all that are in sight are there, else itself; false if it is not there. */
  function gather(zoom, column, row, view, deepest, found) {
    const part = 2 ** -zoom, far = (middle, length, place) => Math.abs((place + 0.5) * part - middle) > length / view.side / 2 + part / 2;
    if (far(view.x, view.width, column) || far(view.y, view.height, row)) return true;
    const tile = ask(zoom, column, row), inner = [];
    if (!tile?.points) return false;
    const whole = zoom < deepest && tile.items > tile.keys.length &&
      [0, 1, 2, 3].map((each) => gather(zoom + 1, 2 * column + (each & 1), 2 * row + (each >> 1), view, deepest, inner)).every(Boolean);
    found.push(...(whole ? inner : [tile]));
    return true;
  }

  function drop(all) {
    for (const [name, tile] of tiles) {
      if (!all && tiles.size <= KEPT) break;
      if (!all && (!tile.points || touched.has(name))) continue;
      free(tile);
      tiles.delete(name);
    }
  }

  return {
    find(view) {
      const found = [], deepest = Math.floor(Math.log2((FINEST * view.side) / Math.max(view.width, view.height)));
      touched.clear();
      gather(0, 0, 0, view, deepest, found);
      drop(false);
      return found;
    },
    clear() {
      closed = true;
      drop(true);
    },
  };
}
