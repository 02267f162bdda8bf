// The map: the items of a gallery as points, fetched by tiles. What the lasso encloses becomes a filter.
import { bytes, call, floats, galleryPath, item, picture } from "./api.js";
import { announce, button, count, h, notice, problem } from "./dom.js";
import { conditions, message, written } from "./filters.js";
import { painter } from "./points.js";
import { href, write } from "./state.js";

const TILES = 40, AT_ONCE = 6, DEEPEST = 14, NEAR = 12; // tiles kept; calls under way; levels; CSS pixels to a point
const STEPS = { ArrowLeft: [-0.15, 0], ArrowRight: [0.15, 0], ArrowUp: [0, -0.15], ArrowDown: [0, 0.15] };
const [THEME, EMPTY] = [matchMedia("(prefers-color-scheme: dark)"), { x: 0.5, y: 0.5, zoom: 1 }];
let root, state, canvas, over, paint, bubble, legend, told, lassoButton, watch; // of the page
let tiles = new Map(), waiting = 0, drawn = [], touched = new Set(), slots = new Map(), only = -1, known = new Map(), shown = "", counted = "";
let view = EMPTY, lasso = null, lassoing = false, frame = 0, settle = 0; // `zoom`: the map's side in shorter sides of the canvas

/** A polygon [[x, y], ...] to at most `most` boxes [left, right, top, bottom]: horizontal strips, cut at their middle. */
export function strips(polygon, most = 24) {
  const [xs, ys] = [0, 1].map((axis) => polygon.map((point) => point[axis]));
  const [top, bottom] = [Math.min(...ys), Math.max(...ys)];
  for (let rows = most; rows > 0; rows--) {
    const boxes = [];
    for (let row = 0; row < rows; row++) {
      const [from, to] = [row, row + 1].map((each) => top + ((bottom - top) * each) / rows), y = (from + to) / 2;
      const cuts = polygon.flatMap(([ax, ay], at) => {
        const [bx, by] = polygon[(at + 1) % polygon.length];
        return ay > y !== by > y ? [ax + ((y - ay) * (bx - ax)) / (by - ay)] : [];
      }).sort((a, b) => a - b);
      for (let at = 0; at < cuts.length; at += 2) boxes.push([cuts[at], cuts[at + 1], from, to]);
    }
    if (boxes.length <= most) return boxes;
  }
  return [[Math.min(...xs), Math.max(...xs), top, bottom]];
}

const side = () => view.zoom * Math.min(canvas.width, canvas.height); // of the map, in pixels of the canvas
const place = ({ offsetX, offsetY }) => [view.x + (offsetX * devicePixelRatio - canvas.width / 2) / side(), view.y + (offsetY * devicePixelRatio - canvas.height / 2) / side()];

/** Find the tiles to draw: four in place of the one above them once all that are in sight are there. */
function gather(zoom, column, row, deepest, found) {
  const part = 2 ** -zoom, [wide, high] = [canvas.width / side() / 2, canvas.height / side() / 2];
  if (Math.abs((column + 0.5) * part - view.x) > wide + part / 2 || Math.abs((row + 0.5) * part - view.y) > high + part / 2) return true;
  const tile = ask(zoom, column, row), below = [];
  if (!tile?.points) return false;
  const whole = zoom < deepest && tile.items > tile.keys.length &&
    [0, 1, 2, 3].map((each) => gather(zoom + 1, 2 * column + (each & 1), 2 * row + (each >> 1), deepest, below)).every(Boolean);
  found.push(...(whole ? below : [tile]));
  return true;
}

function ask(zoom, column, row) {
  const name = `${zoom}/${column}/${row}`, tile = tiles.get(name), all = tiles;
  touched.add(name);
  if (tile) {
    tiles.delete(name); // and in again, as the one used last
    tiles.set(name, tile);
  } else if (waiting < AT_ONCE) {
    waiting++;
    tiles.set(name, {});
    call("POST", galleryPath(state.gallery, "/map:tile"), { zoom, column, row, field: state.colour ?? "$label" })
      .then((reply) => all.set(name, unpack(reply)), (error) => { all.delete(name); if (all === tiles) fail(error); })
      .finally(() => { waiting--; redraw(); });
  }
  return tile;
}

function unpack({ points, keys = [], values = [], value_of, items = 0 }) {
  const [places, of] = [floats(points), new Uint16Array(bytes(value_of).buffer)], slot = values.map((value) => slots.get(value) ?? 8);
  const packed = new Float32Array(keys.length * 3);
  for (let at = 0; at < keys.length; at++) packed.set([places[2 * at], places[2 * at + 1], slot[of[at]] ?? 8], 3 * at);
  return { points: packed, keys, items: Number(items) };
}

function redraw() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    if (!canvas?.isConnected) return;
    const style = getComputedStyle(root), colours = [..."01234567"].map((each) => style.getPropertyValue(`--s${each}`)).concat(style.getPropertyValue("--rest")).map((each) => each.trim());
    const deepest = Math.max(0, Math.min(DEEPEST, Math.floor(Math.log2((4 * side()) / Math.max(canvas.width, canvas.height)))));
    drawn = [];
    touched.clear();
    gather(0, 0, 0, deepest, drawn);
    paint.draw(drawn, { ...view, side: side() }, colours, only);
    for (const [name, tile] of tiles) {
      if (tiles.size <= TILES) break;
      if (!tile.points || touched.has(name)) continue;
      paint.free(tile);
      tiles.delete(name);
    }
    canvas.dataset.points = drawn.reduce((sum, each) => sum + each.keys.length, 0);
    outline(colours[0]);
  });
}

/** Draw the lasso, and the boxes of the one in the filter. */
function outline(colour) {
  const pen = over.getContext("2d"), [left, top] = [view.x - canvas.width / side() / 2, view.y - canvas.height / side() / 2];
  pen.clearRect(0, 0, over.width, over.height);
  [pen.fillStyle, pen.strokeStyle, pen.lineWidth] = [colour, colour, 2 * devicePixelRatio];
  pen.globalAlpha = 0.2;
  for (const [from, to, above, below] of enclosed() ?? []) pen.fillRect((from - left) * side(), (above - top) * side(), (to - from) * side(), (below - above) * side());
  pen.globalAlpha = 1;
  pen.beginPath();
  for (const [x, y] of lasso ?? []) pen.lineTo((x - left) * side(), (y - top) * side());
  pen.stroke();
}

/** The boxes that the filter has; undefined for none. */
const enclosed = () => conditions(state.filter).find(([, operator]) => operator === "within")?.[2];

function enclose(boxes) {
  const others = conditions(state.filter).filter(([, operator]) => operator !== "within");
  write({ filter: written(boxes ? [...others, ["map", "within", boxes.map((box) => box.map((each) => Number(each.toFixed(5))))]] : others) });
}

/** Number of the point nearest to a place, as [tile, index]; null where none is near. */
function nearest([x, y]) {
  let best = null, least = ((NEAR * devicePixelRatio) / side()) ** 2;
  for (const tile of drawn) {
    for (let at = 0; at < tile.keys.length; at++) {
      const far = (tile.points[3 * at] - x) ** 2 + (tile.points[3 * at + 1] - y) ** 2;
      if (far < least) [best, least] = [[tile, at], far];
    }
  }
  return best;
}

async function hover(where) {
  const [tile, at] = nearest(where) ?? [], key = tile?.keys[at];
  canvas.classList.toggle("on-point", Boolean(tile));
  if (bubble.dataset.key === key) return;
  bubble.hidden = !tile;
  if (!tile) return delete bubble.dataset.key;
  bubble.dataset.key = key;
  const [left, top] = [(tile.points[3 * at] - view.x) * side() + canvas.width / 2, (tile.points[3 * at + 1] - view.y) * side() + canvas.height / 2].map((each) => each / devicePixelRatio);
  bubble.style.left = `${Math.min(left + 12, canvas.clientWidth - 150)}px`;
  bubble.style.top = `${Math.max(0, Math.min(top + 12, canvas.clientHeight - 190))}px`;
  bubble.replaceChildren(key);
  if (known.size > 200) known.clear();
  if (!known.has(key)) known.set(key, item(state.gallery, key).catch(() => ({ key })));
  const { label, thumbnail } = await known.get(key);
  if (bubble.dataset.key !== key) return;
  bubble.replaceChildren(thumbnail ? h("img", { src: picture(thumbnail), alt: "" }) : "", h("b", {}, label || "no label"), h("span", {}, key));
  announce(`${label || "no label"}, ${key}`);
}

function pick(where) {
  const [tile, at] = nearest(where) ?? [];
  if (tile) write({ view: "search", key: tile.keys[at], photo: null });
}

function move(x, y, zoom = view.zoom) {
  view = { x: Math.max(0, Math.min(1, x)), y: Math.max(0, Math.min(1, y)), zoom: Math.max(0.5, Math.min(2 ** DEEPEST, zoom)) };
  clearTimeout(settle);
  settle = setTimeout(() => canvas?.isConnected && write({ at: [view.x, view.y, view.zoom].map((each) => Number(each.toPrecision(7))).join() }, { replace: true }), 300);
  redraw();
}

/** Zoom by a factor; what is at `fixed`, a place of the map, stays where it is. */
function zoomBy(factor, [x, y] = [view.x, view.y]) {
  const zoom = Math.max(0.5, Math.min(2 ** DEEPEST, view.zoom * factor)), kept = view.zoom / zoom;
  move(x + (view.x - x) * kept, y + (view.y - y) * kept, zoom);
}

const byLasso = (on) => lassoButton.setAttribute("aria-pressed", (lassoing = on));

function pointers() {
  const held = new Map();
  let moved = 0;
  const down = (event) => {
    canvas.setPointerCapture(event.pointerId);
    held.set(event.pointerId, place(event));
    moved = 0;
    if (held.size === 1 && (lassoing || event.shiftKey)) lasso = [place(event)];
  };
  const drag = (event) => {
    const from = held.get(event.pointerId), to = place(event), [other] = [...held].filter(([id]) => id !== event.pointerId);
    if (!from) return hover(to);
    moved += Math.abs(event.movementX) + Math.abs(event.movementY);
    if (lasso) lasso.push(to), redraw();
    else if (!other) move(view.x + from[0] - to[0], view.y + from[1] - to[1]);
    else {
      const [before, after] = [from, to].map(([x, y]) => Math.hypot(x - other[1][0], y - other[1][1]));
      zoomBy(after / before, other[1]);
    }
    if (!lasso && other) held.set(event.pointerId, place(event));
  };
  const up = (event) => {
    if (!held.delete(event.pointerId)) return;
    const polygon = lasso;
    lasso = null;
    if (polygon) byLasso(false), polygon.length > 2 && enclose(strips(polygon)), redraw();
    else if (moved < 5 && event.type === "pointerup") pick(place(event));
  };
  const wheel = (event) => { event.preventDefault(); zoomBy(1.0015 ** -event.deltaY, place(event)); };
  return { pointerdown: down, pointermove: drag, pointerup: up, pointercancel: up, pointerleave: () => hover([9, 9]), wheel, keydown: press };
}

function press(event) {
  const step = STEPS[event.key], act = { "+": () => zoomBy(1.5), "-": () => zoomBy(1 / 1.5), 0: () => move(...Object.values(EMPTY)), l: () => byLasso(!lassoing),
    Escape: () => { lasso = null; byLasso(false); redraw(); }, Enter: () => pick([view.x, view.y]) }[event.key];
  if (!step && !act) return;
  event.preventDefault();
  if (act) act();
  else move(view.x + step[0] / view.zoom, view.y + step[1] / view.zoom);
  hover([view.x, view.y]);
}

function fail(error) {
  const none = error.status === 400 && /map/.test(error.message);
  root.replaceChildren(none ? notice("This gallery has no map yet", [error.message, h("code", { class: "block" }, `crossbatch gallery map ${state.gallery}`)])
    : problem(error, () => { shown = ""; show(); }));
}

/** Ask for the fields and for the most frequent values of the one that colours, then for tiles anew. */
async function colour(mine) {
  const field = state.colour ?? "$label", path = galleryPath(state.gallery);
  const [{ fields = [] }, { values = [], distinct = 0 }] = await Promise.all([call("GET", `${path}/fields`), call("POST", `${path}/values:list`, { field, page_size: 8 })]);
  if (mine !== shown) return;
  const chooser = h("select", { id: "map-field", on: { change: () => write({ colour: chooser.value }) } }, fields.map(({ name }) => name).filter((name) => !["map_x", "map_y"].includes(name))
    .map((name) => h("option", { value: name, selected: name === field }, name === "$label" ? "label" : name)));
  const names = values.map(({ value }) => String(Object.values(value)[0])), rest = Number(distinct) - names.length;
  slots = new Map(names.map((name, slot) => [name, slot]));
  const one = (slot, name, items) => {
    const swatch = h("i");
    swatch.style.background = slot < 8 ? `var(--s${slot})` : "var(--rest)";
    return h("li", {}, button([swatch, h("span", {}, name), h("b", {}, items)], ({ currentTarget }) => {
      only = only === slot ? -1 : slot;
      for (const each of legend.querySelectorAll("button")) each.setAttribute("aria-pressed", only === slot && each === currentTarget);
      redraw();
    }, { "aria-pressed": "false", title: "Show these alone" }));
  };
  legend.replaceChildren(h("label", {}, "Colour by", chooser), h("ul", { role: "list" }, names.map((name, slot) => one(slot, name, count(values[slot].items))),
    rest > 0 ? one(8, `${count(rest)} other values`, "") : null));
  tiles.forEach(paint.free);
  tiles = new Map();
  redraw();
}

async function tell() {
  const rows = conditions(state.filter);
  if (!rows.length) return told.replaceChildren("Draw around points with the lasso, or with Shift held, to search within.");
  const { items = 0 } = await call("POST", galleryPath(state.gallery, "/items:count"), { filter: message(rows) });
  told.replaceChildren(h("b", {}, `${count(items)} items`), enclosed() ? " within the outline " : " fulfil the filter ", h("a", { class: "chip", href: href({ view: "browse" }) }, "Browse them"), " ",
    h("a", { class: "chip", href: href({ view: "search" }) }, "Search within"), " ", enclosed() ? button("Clear", () => enclose(null)) : null);
}

function show() {
  const listeners = pointers(), wide = (text, name, press) => button(text, press, { "aria-label": name, title: name });
  canvas = h("canvas", { id: "map-canvas", tabindex: 0, role: "application", on: listeners,
    "aria-label": "Map of the gallery. Arrows move it, plus and minus zoom, Enter searches by the item in the middle, L starts the lasso. Browse lists the same items." });
  over = h("canvas", { class: "over" });
  bubble = h("div", { class: "bubble", hidden: true });
  legend = h("div", { id: "map-legend" });
  told = h("p", { id: "map-told", role: "status" });
  lassoButton = button("Lasso", () => byLasso(!lassoing), { "aria-pressed": "false", title: "Draw around points (l)" });
  root.replaceChildren(h("div", { class: "map" }, h("div", { class: "map-frame" }, canvas, over, bubble,
    h("div", { class: "map-tools" }, lassoButton, wide("+", "Zoom in", () => zoomBy(1.5)), wide("−", "Zoom out", () => zoomBy(1 / 1.5)), wide("⌂", "All of it", () => move(0.5, 0.5, 1)))), legend), told);
  paint = painter(canvas);
  tiles = new Map();
  watch = new ResizeObserver(() => {
    for (const each of [canvas, over]) [each.width, each.height] = [canvas.clientWidth, canvas.clientHeight].map((length) => Math.max(1, Math.round(length * devicePixelRatio)));
    redraw();
  });
  watch.observe(canvas);
}

export default {
  name: "map",
  title: "Map",
  keys: [["drag", "move the map"], ["wheel", "zoom"], ["l", "lasso"], ["0", "all of the map"]],
  mount(here) {
    root = here;
    [shown, counted] = ["", ""];
    THEME.addEventListener("change", redraw);
  },
  update(next) {
    const mine = JSON.stringify([next.gallery, next.colour]);
    state = next;
    const [x, y, zoom] = (next.at ?? "").split(",").map(Number);
    if (mine !== shown) {
      if (!canvas?.isConnected) show();
      [shown, only, known] = [mine, -1, new Map()];
      colour(mine).catch(fail);
    }
    if (zoom > 0) view = { x, y, zoom };
    else if (!next.at) view = EMPTY;
    if (counted !== `${next.gallery} ${next.filter}`) tell().catch(fail);
    counted = `${next.gallery} ${next.filter}`;
    redraw();
  },
  unmount() {
    watch?.disconnect();
    clearTimeout(settle);
    THEME.removeEventListener("change", redraw);
  },
};
