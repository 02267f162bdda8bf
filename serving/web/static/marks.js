// Results marked as right or wrong: kept in this browser by gallery, listed, and exported as CSV.
import { download, risky } from "./csv.js";
import { announce, button, count, h, notice, table, toast } from "./dom.js";
import { href, keep, kept } from "./state.js";

const HEADER = ["query", "result", "relevant"];
let root, shown;

const store = (gallery) => `crossbatch-marks-${gallery}`;

/** The marks of a gallery: [query, result, 1 or 0] in the order in which they were made; a query is the key of an item
 * or the name of a photo. */
export const marks = (gallery) => JSON.parse(kept(store(gallery)) ?? "[]");

/** Mark a result: 1 for right, 0 for wrong, null to take the mark away; false where the browser keeps it not. */
export function mark(gallery, query, result, relevant) {
  const others = marks(gallery).filter((each) => each[0] !== query || each[1] !== result);
  return keep(store(gallery), JSON.stringify(relevant === null ? others : [...others, [query, result, relevant]]));
}

const ACTIONS = [["right", "✓", "r", 1], ["wrong", "✗", "w", 0], ["unmarked", null, "u", null]];

/** The actions of a grid that mark its results. */
export const markActions = (gallery, query) => ACTIONS.map(([name, text, key, relevant]) => ({ name, text, key,
  title: `Mark as ${name}`, run: (hit, card) => {
  const now = card.dataset.mark === name ? null : relevant; // once more takes it away
  if (!mark(gallery, query, hit.key, now)) return toast("This browser keeps no more marks. Export those that there are, or let it keep data of this page.");
  dress(card, now);
  announce(`${hit.label || hit.key}: ${card.dataset.mark}`);
} }));

/** Show in a grid which of its items are marked. */
export function showMarks(list, gallery, query) {
  const of = new Map(marks(gallery).filter((each) => each[0] === query).map(([, result, relevant]) => [result, relevant]));
  for (const card of list.children) dress(card, of.get(card.item.key) ?? null);
}

function dress(card, relevant) {
  for (const [name, , , value] of ACTIONS) {
    if (value === relevant) card.dataset.mark = name;
    if (value !== null) card.querySelector(`[data-action=${name}]`).setAttribute("aria-pressed", value === relevant);
  }
}

function line(query, of) {
  const right = of.filter((each) => each[2]).length;
  const results = of.map(([, result, relevant]) => h("li", {}, relevant ? "✓ right: " : "✗ wrong: ", result,
    button("×", () => { mark(shown, query, result, null); show(); }, { class: "quiet", "aria-label": `Remove the mark of ${result}` })));
  return h("tr", {}, h("th", { scope: "row" }, h("a", { href: href({ view: "search", key: query, photo: null }) }, query)),
    h("td", {}, right), h("td", {}, of.length - right), h("td", {}, h("details", {}, h("summary", {}, `${of.length} marked`), h("ul", {}, results))));
}

function show() {
  const all = marks(shown), queries = Map.groupBy(all, (each) => each[0]);
  const bar = h("div", { class: "bar" }, button("Export as CSV", () => download(`marks-${shown}.csv`, [HEADER, ...all]),
    { id: "export-marks", class: "primary", disabled: !all.length }));
  const formulas = risky(all) ? `${risky(all)} names begin with =, +, - or @: open the file as text, for a spreadsheet may take them for formulas.` : null;
  const caption = `${count(all.length)} marks of ${count(queries.size)} queries in ${shown}, kept in this browser only`;
  const made = table("marks-table", caption, ["Query", "Right", "Wrong", "Results"], [...queries].map((each) => line(...each)));
  root.replaceChildren(bar, h("p", { class: "soft" }, formulas), all.length ? made : notice("No marks yet", [
    "Search, move to a result with the arrows, and press r (right), w (wrong) or u (none).",
    "What you export is an evaluation set: `crossbatch evaluate --marks FILE` measures a model by it."]));
}

export default {
  name: "marks", title: "Marks",
  mount: (place) => { root = place; },
  update: ({ gallery }) => { shown = gallery; show(); },
  unmount: () => {},
};
