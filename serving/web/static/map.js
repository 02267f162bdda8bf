// The map: the items of a gallery as points. What the lasso encloses becomes a filter, to search and browse within.
import { call, fieldsOf, galleryPath, item, picture, valuesOf } from "./api.js";
import { announce, button, count, fieldName, h, notice, problem } from "./dom.js";
import { conditions, message, written } from "./filters.js";
import { painter } from "./points.js";
import { href, write } from "./state.js";
import { tileStore } from "./tiles.js";

const NEAR = 12, NEAREST = 2 ** 14; // CSS pixels to a point; the most the map is enlarged
const STEPS = { ArrowLeft: [-0.15, 0], ArrowRight: [0.15, 0], ArrowUp: [0, -0.15], ArrowDown: [0, 0.15] };
const theme = matchMedia("(prefers-color-scheme: dark)");
const ALL = { x: 0.5, y: 0.5, zoom: 1 }; // a view: its middle, and the map's side in shorter sides of the canvas
let root, state, canvas, over, paint, bubble, legend, told, lassoButton, watch, tiles;
let view = ALL, drawn = [], only = -1, known = new Map(), lasso = null, lassoing = false, frame = 0, settle = 0, shown = "", counted = "";

/** A polygon [[x, y], ...] as at most `most` boxes [left, right, top, bottom]: horizontal strips, cut at their middle. */
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

// Places are [x, y] of the map; pixels are those of the canvas.
const side = () => view.zoom * Math.min(canvas.width, canvas.height);
const placeOf = (event) => [view.x + (event.offsetX * devicePixelRatio - canvas.width / 2) / side(),
  view.y + (event.offsetY * devicePixelRatio - canvas.height / 2) / side()];
const pixelOf = ([x, y]) => [(x - view.x) * side() + canvas.width / 2, (y - view.y) * side() + canvas.height / 2];

/** The boxes of the filter; undefined where it has none. */
const enclosed = () => conditions(state.filter).find(([, operator]) => operator === "within")?.[2];

function enclose(boxes) {
  const others = conditions(state.filter).filter(([, operator]) => operator !== "within");
  const row = ["map", "within", boxes.map((box) => box.map((each) => Number(each.toFixed(5))))];
  write({ filter: written(boxes.length ? [...others, row] : others) });
}

function redraw() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    if (!canvas?.isConnected || !tiles) return;
    const style = getComputedStyle(root);
    const colours = ["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "rest"].map((each) => style.getPropertyValue(`--${each}`).trim());
    const seen = { ...view, side: side(), width: canvas.width, height: canvas.height };
    drawn = tiles.find(seen);
    paint.draw(drawn, seen, colours, only);
    canvas.dataset.points = drawn.reduce((sum, each) => sum + each.keys.length, 0);
    outline(colours[0]);
  });
}

function outline(colour) {
  const pen = over.getContext("2d");
  pen.clearRect(0, 0, over.width, over.height);
  Object.assign(pen, { fillStyle: colour, strokeStyle: colour, lineWidth: 2 * devicePixelRatio, globalAlpha: 0.2 });
  for (const [left, right, top, bottom] of enclosed() ?? []) pen.fillRect(...pixelOf([left, top]), (right - left) * side(), (bottom - top) * side());
  pen.globalAlpha = 1;
  pen.beginPath();
  for (const place of lasso ?? []) pen.lineTo(...pixelOf(place));
  pen.stroke();
}

/** The point that is nearest to a place, as {key, place}; null where none is near. */
function nearest([x, y]) {
  let best = null, least = ((NEAR * devicePixelRatio) / side()) ** 2;
  for (const { points, keys } of drawn) {
    for (let at = 0; at < keys.length; at++) {
      const far = (points[3 * at] - x) ** 2 + (points[3 * at + 1] - y) ** 2;
      if (far < least) [best, least] = [{ key: keys[at], place: points.slice(3 * at, 3 * at + 2) }, far];
    }
  }
  return best;
}

async function hover(where) {
  const near = where && nearest(where), key = near?.key;
  canvas.classList.toggle("on-point", Boolean(near));
  bubble.hidden = !near;
  if (!near || bubble.dataset.key === key) return;
  bubble.dataset.key = key;
  const [left, top] = pixelOf(near.place).map((each) => each / devicePixelRatio + 12);
  Object.assign(bubble.style, { left: `${Math.min(left, canvas.clientWidth - 150)}px`,
    top: `${Math.max(0, Math.min(top, canvas.clientHeight - 200))}px` });
  bubble.replaceChildren(key);
  await new Promise((resolve) => setTimeout(resolve, 80)); // a pointer that passes by asks for nothing
  if (bubble.dataset.key !== key) return;
  if (known.size > 200) known.clear();
  if (!known.has(key)) known.set(key, item(state.gallery, key).catch(() => ({})));
  const { label, thumbnail } = await known.get(key);
  if (bubble.dataset.key !== key) return;
  bubble.replaceChildren(thumbnail ? h("img", { src: picture(thumbnail), alt: "" }) : "", h("b", {}, label || "no label"), h("span", {}, key));
  announce(`${label || "no label"}, ${key}`);
}

function pick(where) {
  const near = nearest(where);
  if (near) write({ view: "search", key: near.key, photo: null, at: null, colour: null });
}

const within = (x, y, zoom) => ({ x: Math.max(0, Math.min(1, x)), y: Math.max(0, Math.min(1, y)), zoom: Math.max(0.5, Math.min(NEAREST, zoom)) });

/** Look at a place from as near as `zoom`; the address follows once it stays so. */
function move(x, y, zoom = view.zoom) {
  view = within(x, y, zoom);
  bubble.hidden = true;
  delete bubble.dataset.key; // its place is another one now
  clearTimeout(settle);
  settle = setTimeout(() => write({ at: Object.values(view).map((each) => Number(each.toPrecision(7))).join() }, { replace: true }), 300);
  redraw();
}

/** Zoom by a factor; a place that is fixed stays where it is. */
function zoomBy(factor, [x, y] = [view.x, view.y]) {
  const kept = view.zoom / Math.max(0.5, Math.min(NEAREST, view.zoom * factor));
  move(x + (view.x - x) * kept, y + (view.y - y) * kept, view.zoom / kept);
}

const byLasso = (on) => lassoButton.setAttribute("aria-pressed", (lassoing = on));

/** The listeners of the canvas: drag, pinch, tap and lasso. */
function pointers() {
  const held = new Map(); // the place under each finger
  let moved = 0;
  const pointerdown = (event) => {
    canvas.setPointerCapture(event.pointerId);
    held.set(event.pointerId, placeOf(event));
    moved = 0;
    lasso = held.size === 1 && (lassoing || event.shiftKey) ? [placeOf(event)] : null;
  };
  const pointermove = (event) => {
    const from = held.get(event.pointerId), to = placeOf(event), [other] = [...held].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
    if (!from) return hover(to);
    moved += Math.hypot(event.movementX, event.movementY);
    if (lasso) lasso.push(to);
    else if (other) zoomBy(Math.hypot(to[0] - other[0], to[1] - other[1]) / Math.hypot(from[0] - other[0], from[1] - other[1]), other);
    else move(view.x + from[0] - to[0], view.y + from[1] - to[1]);
    if (other) held.set(event.pointerId, placeOf(event));
    redraw();
  };
  const pointerup = (event) => {
    const polygon = lasso;
    if (!held.delete(event.pointerId)) return;
    lasso = null;
    if (polygon?.length > 2) enclose(strips(polygon));
    else if (!polygon && moved < 5 && event.type === "pointerup") pick(placeOf(event));
    if (polygon) byLasso(false);
    redraw();
  };
  const wheel = (event) => { event.preventDefault(); zoomBy(1.0015 ** -event.deltaY, placeOf(event)); };
  return { pointerdown, pointermove, pointerup, pointercancel: pointerup, pointerleave: () => hover(null), wheel, keydown };
}

function keydown(event) {
  const step = STEPS[event.key], middle = [view.x, view.y];
  const act = step ? () => move(view.x + step[0] / view.zoom, view.y + step[1] / view.zoom) : {
    "+": () => zoomBy(1.5), "-": () => zoomBy(1 / 1.5), 0: () => move(...Object.values(ALL)),
    l: () => byLasso(!lassoing), Escape: () => { lasso = null; byLasso(false); redraw(); }, Enter: () => pick(middle) }[event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
  hover([view.x, view.y]);
}

/** Ask for the fields and for the most frequent values of the one that colours; then the tiles can come. */
async function colourBy(field, mine) {
  const [fields, { values, distinct }] = await Promise.all([fieldsOf(state.gallery), valuesOf(state.gallery, field, 8)]);
  if (mine !== shown) return;
  const how = h("code", { class: "block" }, `crossbatch gallery map ${state.gallery}`);
  if (!fields.some(({ name }) => name === "map_x")) return root.replaceChildren(notice("This gallery has no map yet", [
    "This makes one, beside the server that runs:", how]));
  const names = values.map(([value]) => String(value)), rest = distinct - names.length;
  const chooser = h("select", { id: "map-field", on: { change: () => write({ colour: chooser.value }) } },
    fields.filter(({ name }) => name !== "map_x" && name !== "map_y")
      .map(({ name }) => h("option", { value: name, selected: name === field }, fieldName(name))));
  const line = (slot, name, items) => {
    const dot = h("i"), press = ({ currentTarget }) => {
      only = only === slot ? -1 : slot;
      for (const each of legend.querySelectorAll("button")) each.setAttribute("aria-pressed", only === slot && each === currentTarget);
      redraw();
    };
    dot.style.background = slot < 8 ? `var(--s${slot})` : "var(--rest)";
    return h("li", {}, button([dot, h("span", {}, name), h("b", {}, items)], press, { "aria-pressed": "false", title: "Show these alone" }));
  };
  legend.replaceChildren(h("label", {}, "Colour by", chooser), h("ul", { role: "list" },
    names.map((name, slot) => line(slot, name, count(values[slot][1]))),
    line(8, rest > 0 ? `${count(rest)} other values, or none` : "none of these", "")));
  tiles?.clear();
  tiles = tileStore({ gallery: state.gallery, field, slots: new Map(names.map((name, slot) => [[...name].slice(0, 200).join(""), slot])),
    changed: redraw, fail, free: paint.free });
  redraw();
}

async function tell() {
  const rows = conditions(state.filter), { gallery } = state;
  if (!rows.length) return told.replaceChildren("Draw around points with the lasso, or with Shift held, to search within.");
  const { items = 0 } = await call("POST", galleryPath(gallery, "/items:count"), { filter: message(rows) });
  const to = (name, text) => [" ", h("a", { class: "chip", href: href({ view: name, at: null, colour: null }) }, text)];
  told.replaceChildren(h("b", {}, `${count(items)} items`), enclosed() ? " within the outline" : " pass the filter",
    ...to("search", "Search within"), ...to("browse", "Browse them"), " ",
    enclosed() ? button("Clear the outline", () => enclose([])) : "");
}

const fail = (error) => root.replaceChildren(problem(error, () => { build(); colourBy(state.colour ?? "$label", shown).catch(fail); }));

function build() {
  tiles?.clear();
  [tiles, drawn] = [null, []];
  const tool = (text, title, press) => button(text, press, { "aria-label": title, title });
  canvas = h("canvas", { id: "map-canvas", tabindex: 0, role: "application", on: pointers(),
    "aria-label": "Map of the gallery: arrows move it, plus and minus zoom, Enter searches by the item in the middle, L starts the lasso. Browse lists the same items." });
  [over, bubble] = [h("canvas", { class: "over" }), h("div", { class: "bubble", hidden: true })];
  [legend, told] = [h("section", { id: "map-legend", "aria-label": "Colours" }), h("p", { role: "status" })];
  lassoButton = button("Lasso", () => byLasso(!lassoing), { "aria-pressed": "false", title: "Draw around points (l)" });
  const tools = h("div", { class: "map-tools" }, lassoButton,
    tool("+", "Zoom in", () => zoomBy(1.5)), tool("−", "Zoom out", () => zoomBy(1 / 1.5)),
    tool("All", "All of the map", () => move(...Object.values(ALL))));
  root.replaceChildren(told, h("div", { class: "map" }, h("div", { class: "map-frame" }, canvas, over, bubble, tools), legend));
  paint = painter(canvas);
  watch?.disconnect();
  watch = new ResizeObserver(() => {
    const inside = [canvas.clientWidth, canvas.clientHeight].map((length) => Math.max(1, Math.round(length * devicePixelRatio)));
    for (const each of [canvas, over]) [each.width, each.height] = inside;
    redraw();
  });
  watch.observe(canvas);
}

export default {
  name: "map", title: "Map",
  keys: [["drag, wheel, pinch", "move the map, zoom"], ["l", "lasso, on the map"], ["0", "all of the map"]],
  mount(place) {
    [root, state, view, shown, counted, known] = [place, {}, ALL, "", "", new Map()];
    build();
    theme.addEventListener("change", redraw);
  },
  update(next) {
    const [x, y, zoom] = (next.at ?? "").split(",").map(Number);
    const mine = JSON.stringify([next.gallery, next.colour]), asked = `${next.gallery} ${next.filter}`;
    if (mine !== shown && !canvas.isConnected) build();
    if (next.at !== state.at) view = [x, y, zoom].every(Number.isFinite) ? within(x, y, zoom) : ALL;
    state = next;
    if (mine !== shown) {
      [shown, only] = [mine, -1];
      colourBy(next.colour ?? "$label", mine).catch(fail);
    }
    if (asked !== counted) tell().catch((error) => told.replaceChildren(error.message));
    counted = asked;
    redraw();
  },
  unmount() {
    tiles?.clear();
    watch.disconnect();
    clearTimeout(settle);
    theme.removeEventListener("change", redraw);
  },
};
