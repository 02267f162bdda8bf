// Draws the points of tiles: by WebGL, or on a plain canvas where that is missing.
const VERTEX = `attribute vec3 point; uniform vec2 scale, shift; uniform float size, only; uniform vec3 palette[9]; varying vec4 colour;
void main() {
  gl_Position = vec4(point.xy * scale + shift, 0.0, 1.0);
  gl_PointSize = size;
  colour = vec4(palette[int(point.z)], only < 0.0 || only == point.z ? 0.85 : 0.08);
}`;
const FRAGMENT = `precision mediump float; varying vec4 colour;
void main() { if (distance(gl_PointCoord, vec2(0.5)) > 0.5) discard; gl_FragColor = colour; }`;

/** -> draw(tiles, view, colours, only) and free(tile). A tile has `points`, float32 (n, 3): x and y in [0, 1], and which
 * of the nine `colours`, "#rrggbb". A view is {x, y, side}: what is in the middle, and the map's side in pixels of the
 * canvas. `only` is the one colour that is not dimmed, -1 for all. */
export function painter(canvas) {
  const gl = canvas.getContext("webgl", { antialias: false });
  return gl ? webgl(canvas, gl) : plain(canvas, canvas.getContext("2d"));
}

/** As wide as lets the points cover a part of the canvas, within 2.5 to 8 CSS pixels. */
function pointSize(canvas, tiles) {
  const number = tiles.reduce((sum, { keys }) => sum + keys.length, 1), wide = Math.sqrt((0.06 * canvas.width * canvas.height) / number);
  return Math.max(2.5 * devicePixelRatio, Math.min(8 * devicePixelRatio, wide));
}

function webgl(canvas, gl) {
  const program = gl.createProgram(), at = (name) => gl.getUniformLocation(program, name);
  for (const [kind, source] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]]) {
    const shader = gl.createShader(kind);
    gl.shaderSource(shader, source);
    gl.compileShader(shader);
    gl.attachShader(program, shader);
  }
  gl.bindAttribLocation(program, 0, "point");
  gl.linkProgram(program);
  gl.useProgram(program);
  gl.enableVertexAttribArray(0);
  gl.enable(gl.BLEND);
  gl.blendFuncSeparate(gl.SRC_ALPHA, gl.ONE_MINUS_SRC_ALPHA, gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
  return {
    draw(tiles, { x, y, side }, colours, only) {
      const [across, down] = [(2 * side) / canvas.width, (2 * side) / canvas.height];
      gl.viewport(0, 0, canvas.width, canvas.height);
      gl.clear(gl.COLOR_BUFFER_BIT);
      gl.uniform2f(at("scale"), across, -down);
      gl.uniform2f(at("shift"), -x * across, y * down);
      gl.uniform1f(at("size"), pointSize(canvas, tiles));
      gl.uniform1f(at("only"), only);
      gl.uniform3fv(at("palette"), colours.flatMap((each) => [1, 3, 5].map((from) => parseInt(each.slice(from, from + 2), 16) / 255)));
      for (const tile of tiles) {
        const fresh = !tile.buffer;
        gl.bindBuffer(gl.ARRAY_BUFFER, (tile.buffer ??= gl.createBuffer()));
        if (fresh) gl.bufferData(gl.ARRAY_BUFFER, tile.points, gl.STATIC_DRAW);
        gl.vertexAttribPointer(0, 3, gl.FLOAT, false, 0, 0);
        gl.drawArrays(gl.POINTS, 0, tile.keys.length);
      }
    },
    free: ({ buffer = null }) => gl.deleteBuffer(buffer),
  };
}

function plain(canvas, pen) {
  return {
    draw(tiles, { x, y, side }, colours, only) {
      const size = pointSize(canvas, tiles), [left, top] = [canvas.width / 2 - x * side - size / 2, canvas.height / 2 - y * side - size / 2];
      pen.clearRect(0, 0, canvas.width, canvas.height);
      for (const { points } of tiles) {
        for (let at = 0; at < points.length; at += 3) {
          pen.globalAlpha = only < 0 || only === points[at + 2] ? 0.85 : 0.08;
          pen.fillStyle = colours[points[at + 2]];
          pen.fillRect(points[at] * side + left, points[at + 1] * side + top, size, size);
        }
      }
    },
    free: () => {},
  };
}
