// The picture of the query: what the model sees of it, and a region drawn on it to search with.
import { button, h } from "./dom.js";

const SIDE = 640; // pixels of the longer side of the canvas
const LEAST = 0.04; // least side of a region, as a share of the picture's; less is a click
export const WHOLE = [0, 0, 1, 1];

/** Whether it is a region: [x, y, width, height], shares of the picture. */
export const isRegion = (given) => given.length === 4 && given.every((each) => each >= 0 && each <= 1) && given[2] > 0 && given[3] > 0;

/** Load a picture from an address, upright as its EXIF has it; null where the browser cannot read its format. */
export async function load(address) {
  const image = new Image();
  image.src = address;
  return image.decode().then(() => image, () => null);
}

/** The square that a model sees of a region [x, y, width, height] (shares of the picture): [left, top, side] in pixels. */
export function square(image, region, fraction) {
  const [x, y, width, height] = region ?? WHOLE, wide = width * image.naturalWidth, high = height * image.naturalHeight;
  const side = Math.min(wide, high) * fraction;
  return [x * image.naturalWidth + (wide - side) / 2, y * image.naturalHeight + (high - side) / 2, side];
}

/** Draw the square that the model sees on a canvas of its own size. */
export function drawSeen(canvas, image, region, { image_size: size, crop_fraction: fraction }) {
  const [left, top, side] = square(image, region, fraction);
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(image, left, top, side, side, 0, 0, size, size);
}

/** Cut a region out, as a JPEG: what is sent in place of the picture. */
export async function cut(image, [x, y, width, height]) {
  const [wide, high] = [image.naturalWidth, image.naturalHeight];
  const canvas = h("canvas", { width: Math.max(1, Math.round(width * wide)), height: Math.max(1, Math.round(height * high)) });
  canvas.getContext("2d").drawImage(image, -Math.round(x * wide), -Math.round(y * high));
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.95));
}

/** {element, show(image, region, spec)}; `onCrop(region)` gets a region or null for the whole picture. */
export function cropper({ onCrop }) {
  let image = null, spec = null, region = null, from = null;
  const canvas = h("canvas", { id: "crop-canvas", tabindex: 0, role: "application", "aria-label":
    "Picture of the query. Drag over a region to search with it. By keyboard: arrows move a region, with Shift they resize it, Enter searches, Escape takes the whole picture.",
    on: { pointerdown: begin, pointermove: drag, pointerup: end, pointercancel: () => { from = null; draw(); }, keydown: press } });
  const seen = h("canvas", { id: "seen-canvas", role: "img", "aria-label": "The query as the model sees it" });
  const whole = button("Whole picture", () => onCrop(null), { id: "crop-whole" });
  const told = h("p", { class: "soft" });
  const element = h("div", { class: "crop", hidden: true }, canvas, h("div", { class: "seen" }, seen, h("div", {}, told, whole)));

  function draw() {
    if (!image) return;
    const context = canvas.getContext("2d"), { width, height } = canvas;
    context.drawImage(image, 0, 0, width, height);
    const scale = width / image.naturalWidth, [left, top, side] = square(image, region, spec.crop_fraction).map((each) => each * scale);
    const [x, y, wide, high] = (region ?? WHOLE).map((each, index) => each * (index % 2 ? height : width));
    context.fillStyle = "rgb(0 0 0 / 0.5)"; // over what is not searched with
    context.fill(new Path2D(`M0 0H${width}V${height}H0ZM${left} ${top}V${top + side}H${left + side}V${top}Z`), "evenodd");
    for (const [colour, dash] of [["#000", []], ["#fff", [6, 6]]]) {
      context.strokeStyle = colour;
      context.setLineDash(dash);
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, Math.max(0, wide - 2), Math.max(0, high - 2));
    }
    drawSeen(seen, image, region, spec);
    whole.hidden = !region;
    told.textContent = region ? "The region as the model sees it." : "What the model sees. Drag over the picture to search with a part of it.";
  }

  function place(event) {
    const box = canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height].map((each) => Math.min(1, Math.max(0, each)));
  }

  function begin(event) {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    from = { at: place(event), before: region };
  }

  function drag(event) {
    if (!from) return;
    const [x, y] = place(event), [left, top] = from.at;
    region = [Math.min(x, left), Math.min(y, top), Math.abs(x - left), Math.abs(y - top)];
    if (region[2] < LEAST || region[3] < LEAST) region = from.before;
    draw();
  }

  function end() {
    if (from && region !== from.before) onCrop(region);
    from = null;
  }

  function press(event) {
    const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [0, 0];
    if (event.key === "Enter" && region) onCrop(region);
    else if (event.key === "Escape") onCrop(null);
    else if (dx || dy) {
      const [x, y, width, height] = region ?? [0.2, 0.2, 0.6, 0.6], by = 0.05, within = (least, most, value) => Math.min(most, Math.max(least, value));
      region = event.shiftKey
        ? [x, y, within(by, 1 - x, width + dx * by), within(by, 1 - y, height + dy * by)]
        : [within(0, 1 - width, x + dx * by), within(0, 1 - height, y + dy * by), width, height];
      draw();
    } else return;
    event.preventDefault();
  }

  return {
    element,
    show(picture, chosen, model) {
      [image, region, spec] = [picture, chosen ?? null, model];
      if (image) {
        const scale = SIDE / Math.max(image.naturalWidth, image.naturalHeight);
        canvas.width = Math.round(image.naturalWidth * scale);
        canvas.height = Math.round(image.naturalHeight * scale);
      }
      element.hidden = !image;
      draw();
    },
  };
}
