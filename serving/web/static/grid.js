// Items as a grid of pictures. One card is in the tab order; arrows move between them, letters run its actions.
import { button, digits, h } from "./dom.js";
import { picture } from "./api.js";

const LONGEST = 300; // characters of a value that is shown

/** Show items {key, label, uri, score, metadata, thumbnail}. `onPick(item)` is for a click or Enter on the picture,
 * `pick` what that does, in words; `actions` are
 * {name, title, text, key, run(item, card)}: a button of each card where there is text, and a letter. */
export function grid(items, { onPick, pick = "More like this", actions = [] } = {}) {
  const cards = items.map((item, index) => card(item, index, { onPick, pick, actions }));
  const list = h("ul", { class: "grid", role: "list" }, cards);
  const enter = (chosen) => {
    for (const each of cards) for (const control of each.controls) control.tabIndex = each === chosen ? 0 : -1;
  };
  if (cards.length) enter(cards[0]);
  list.addEventListener("focusin", (event) => enter(event.target.closest(".card")));
  list.addEventListener("keydown", (event) => {
    const here = event.target.closest(".card");
    if (event.ctrlKey || event.metaKey || event.altKey || !here) return;
    const action = actions.find((each) => each.key === event.key);
    const next = step(cards.filter((each) => !each.hidden), here, event.key);
    if (!action && !next) return;
    event.preventDefault();
    event.stopPropagation();
    if (action) action.run(here.item, here);
    else next.controls[0].focus();
  });
  return list;
}

function step(cards, here, key) {
  const at = cards.indexOf(here);
  const second = cards.findIndex((each) => each.offsetTop > cards[0].offsetTop), columns = second < 0 ? cards.length : second;
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + columns, ArrowUp: at - columns, Home: 0, End: cards.length - 1 }[key];
  return to === undefined ? null : (cards[to] ?? here);
}

function card(item, index, { onPick, pick, actions }) {
  const { key, label, score, thumbnail } = item;
  const name = `${pick}: ${label || key}${score === undefined ? "" : `, score ${digits(score)}`}, ${key}`;
  const address = picture(thumbnail);
  const front = button(
    address ? h("img", { src: address, alt: "", loading: index < 24 ? "eager" : "lazy", decoding: "async" }) : h("span", { class: "bare" }, label || key),
    () => onPick?.(item), { class: "picture", "aria-label": name, title: pick });
  const buttons = actions.filter((each) => each.text).map((action) => button(action.text, () => action.run(item, element),
    { dataset: { action: action.name }, title: action.key ? `${action.title} (${action.key})` : action.title,
      "aria-label": `${action.title}: ${label || key}` }));
  const more = details(item);
  const element = h("li", { class: "card", dataset: { key, ...(score !== undefined && { score }) } }, front,
    h("div", { class: "about" },
      h("div", { class: "line" },
        score === undefined ? null : h("b", { class: "score" }, digits(score)), h("span", { class: "label", title: label ?? "" }, label || "no label")),
      h("div", { class: "key", title: key }, key), more),
    buttons.length ? h("div", { class: "actions" }, buttons) : null);
  element.item = item;
  element.controls = [front, ...buttons, ...(more ? [more.firstChild] : [])];
  return element;
}

function details({ metadata, uri }) {
  const fields = Object.entries(metadata ?? {}).sort(([one], [other]) => (one < other ? -1 : 1));
  const cut = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST)}…` : text);
  const text = (value) => cut(typeof value === "string" ? value : JSON.stringify(value));
  const told = fields.filter(([name, value]) => value && typeof value !== "object" && !/^map_[xy]$/.test(name));
  const brief = told.map(([name, value]) => (value === true ? name : typeof value === "number" ? `${name} ${value}` : value));
  if (uri) fields.push(["uri", uri]);
  if (!fields.length) return null;
  return h("details", {},
    h("summary", {}, cut(brief.join(" · ")) || "details"),
    h("dl", {}, fields.map(([name, value]) => [h("dt", {}, name), h("dd", {},
      typeof value === "string" && /^https?:\/\//i.test(value)
        ? h("a", { href: value, rel: "noreferrer noopener", target: "_blank" }, cut(value)) : text(value))])));
}
