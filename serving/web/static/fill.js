// Fills a part of the page with what the server is asked for.
import { problem } from "./dom.js";

const work = new WeakMap(); // by the part

/** Break off what fills a part. */
export const stop = (place) => work.get(place)?.abort();

/** Fill a part with the nodes that `ask(signal)` gives, in place of an earlier call's; a fault is shown there, too. */
export async function fill(place, ask) {
  stop(place);
  const mine = new AbortController();
  work.set(place, mine);
  place.setAttribute("aria-busy", "true");
  const shown = await ask(mine.signal).catch((error) => [problem(error, () => fill(place, ask))]);
  if (mine.signal.aborted) return;
  place.replaceChildren(...shown.filter(Boolean));
  place.removeAttribute("aria-busy");
}
