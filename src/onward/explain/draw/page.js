function (key) {
  "use strict";
  const root = document.querySelector('[data-drawing="' + key + '"]:not(.live)');
  if (!root) return;
  root.classList.add("live");
  const data = JSON.parse(root.querySelector(".ow-data").textContent);
  const stage = root.querySelector(".ow-stage");
  const svg = stage.querySelector("svg");
  const path = root.querySelector(".ow-path");
  const panel = make("div", "ow-details");
  const search = make("input");
  let number = 0, view = null, world = null, place = { x: 0, y: 0, scale: 1 }, pressed = null;

  function make(tag, kind, text) {
    const element = document.createElement(tag);
    if (kind) element.className = kind;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // Places: where the picture stands on the stage.

  function move(x, y, scale) {
    place = { x: x, y: y, scale: scale };
    world.setAttribute("transform", "translate(" + x + " " + y + ") scale(" + scale + ")");
  }

  function fit() {
    const wide = stage.clientWidth / view.width, high = stage.clientHeight / view.height;
    const scale = Math.min(1.25, Math.max(Math.min(wide, high), Math.min(wide, 0.7)));
    const y = Math.max(0, (stage.clientHeight - view.height * scale) / 2);
    move((stage.clientWidth - view.width * scale) / 2, Math.min(y, 24), scale);
  }

  function zoom(factor, x, y) {
    const scale = Math.min(4, Math.max(0.05, place.scale * factor)), by = scale / place.scale;
    move(x - (x - place.x) * by, y - (y - place.y) * by, scale);
  }

  // Views: which scopes are open.

  function show(next, node) {
    const before = node === undefined ? null : middleOf(node);
    number = next;
    view = data.views[next];
    svg.removeAttribute("viewBox");
    svg.innerHTML = '<g class="ow-world' + (before ? " opened" : "") + '">' + view.svg + "</g>";
    world = svg.firstChild;
    choose(null);
    Object.keys(view.goes).forEach(mark);
    crumbs();
    find();
    grow();
    if (!before) return fit();
    move(place.x, place.y, Math.max(Math.min(place.scale, stage.clientWidth / view.width), 0.45));
    const after = middleOf(node);
    if (!after) return fit();
    const free = stage.clientWidth - view.width * place.scale, high = Math.min(Math.max(before.y, 40), 120);
    move(free >= 0 ? free / 2 : Math.min(20, place.x + before.x - after.x), place.y + high - after.y, place.scale);
    if (view.width * place.scale <= stage.clientWidth && view.height * place.scale <= stage.clientHeight) fit();
  }

  function grow() {  // never smaller again: what stands below would jump
    if (root.closest(".ow-whole")) return;
    const high = view.height * Math.min(1, stage.clientWidth / view.width);
    stage.style.height = Math.round(Math.max(stage.clientHeight * (number > 0), Math.min(Math.max(high, 260), 620))) + "px";
  }

  function middleOf(node) {
    const found = world.querySelector('[data-node="' + node + '"].fold, [data-node="' + node + '"].frame');
    if (!found) return null;
    const box = found.querySelector("rect").getBoundingClientRect(), on = stage.getBoundingClientRect();
    return { x: box.left - on.left + box.width / 2, y: box.top - on.top };
  }

  function mark(node) {
    world.querySelectorAll('[data-node="' + node + '"].fold, [data-node="' + node + '"].frame').forEach(function (g) {
      const box = g.querySelector(":scope > rect:last-of-type"), sign = document.createElementNS(svg.namespaceURI, "text");
      g.classList.add("way");
      sign.setAttribute("class", "toggle");
      sign.setAttribute("x", +box.getAttribute("x") + +box.getAttribute("width") - 15);
      sign.setAttribute("y", +box.getAttribute("y") + 16);
      sign.textContent = g.classList.contains("frame") ? "−" : "+";
      g.appendChild(sign);
    });
  }

  function crumbs() {
    path.textContent = "";
    view.path.forEach(function (step, i) {
      if (i) path.appendChild(make("i", "", "›"));
      const last = i === view.path.length - 1, name = make(last ? "b" : "a", "", step[0]);
      if (!last) name.onclick = function () { show(step[1]); };
      path.appendChild(name);
    });
  }

  // Boxes: what is chosen, what is next to it, what is said about it.

  function choose(box) {
    world.querySelectorAll(".near, .chosen").forEach(function (e) { e.classList.remove("near", "chosen"); });
    world.classList.toggle("picked", !!box);
    panel.remove();
    if (!box) return;
    const chosen = box.dataset.key, near = new Set([chosen]);
    world.querySelectorAll(".edge").forEach(function (edge) {
      if (edge.dataset.from !== chosen && edge.dataset.to !== chosen) return;
      edge.classList.add("near");
      near.add(edge.dataset.from).add(edge.dataset.to);
    });
    world.querySelectorAll(".box").forEach(function (b) { b.classList.toggle("near", near.has(b.dataset.key)); });
    box.classList.add("chosen");
    tell(data.details[view.says[chosen]]);
    const over = box.getBoundingClientRect().right - panel.getBoundingClientRect().left + 24;
    if (over > 0) move(place.x - over, place.y, place.scale);
  }

  function tell(details) {
    panel.textContent = "";
    const close = make("button", "close", "×");
    close.onclick = function () { choose(null); };
    panel.appendChild(close);
    describe(panel, details, true);
    stage.appendChild(panel);
    panel.scrollTop = 0;
  }

  function describe(into, details, titled) {
    if (titled) {
      const title = make("h3", "", details.title);
      title.style.setProperty("--lane", "var(--ow-" + details.lane + ")");
      into.appendChild(title);
    }
    table(into, "rows", details.rows);
    (details.lists || []).forEach(function (list) {
      into.appendChild(make("h4", "", list[0]));
      table(into, "list", list[1]);
    });
    (details.inside || []).forEach(function (way) {
      const button = make("button", "", "look inside: " + way[0]);
      button.style.marginTop = "10px";
      button.onclick = function () { show(way[1]); };
      into.appendChild(button);
    });
    (details.ops || []).forEach(function (op) {
      const one = make("details");
      one.appendChild(make("summary", "", op.title));
      describe(one, op, false);
      into.appendChild(one);
    });
  }

  function table(into, kind, rows) {
    const made = make("table", kind);
    (rows || []).forEach(function (row) {
      const line = made.insertRow();
      row.forEach(function (cell) { line.insertCell().textContent = cell; });
    });
    into.appendChild(made);
  }

  function find() {
    const words = search.value.trim().toLowerCase();
    world.querySelectorAll(".box").forEach(function (box) {
      const says = data.details[view.says[box.dataset.key]] || {};
      const names = (says.lists || []).map(function (l) { return l[1].map(function (r) { return r[0]; }).join(" "); });
      const text = (box.textContent + " " + (says.title || "") + " " + names.join(" ")).toLowerCase();
      box.classList.toggle("found", !!words && text.indexOf(words) >= 0);
    });
  }

  // What the reader does.

  function point(event) {
    const on = stage.getBoundingClientRect();
    return { x: event.clientX - on.left, y: event.clientY - on.top };
  }

  stage.addEventListener("wheel", function (event) {
    const scrolls = document.documentElement.scrollHeight > window.innerHeight;
    const asked = event.ctrlKey || event.metaKey || root.contains(document.activeElement);
    if ((scrolls && !asked) || panel.contains(event.target)) return;  // the notebook scrolls until it is clicked
    event.preventDefault();
    const at = point(event);
    zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), at.x, at.y);
  }, { passive: false });

  stage.addEventListener("pointerdown", function (event) {
    if (event.button || panel.contains(event.target)) return;
    pressed = { x: event.clientX, y: event.clientY, from: place, moved: false, on: event.target };
  });

  stage.addEventListener("pointermove", function (event) {
    if (!pressed) return;
    const x = event.clientX - pressed.x, y = event.clientY - pressed.y;
    if (!pressed.moved && Math.abs(x) + Math.abs(y) < 5) return;
    if (!pressed.moved) stage.setPointerCapture(event.pointerId);
    pressed.moved = true;
    stage.classList.add("moving");
    move(pressed.from.x + x, pressed.from.y + y, place.scale);
  });

  function release() {
    if (pressed && !pressed.moved) click(pressed.on);
    pressed = null;
    stage.classList.remove("moving");
  }

  function click(target) {
    const box = target.closest(".box"), frame = target.closest(".frame");
    const node = box ? box.dataset.node : frame ? frame.dataset.node : null;
    const next = node === null ? undefined : view.goes[node];
    if (box && !(box.classList.contains("fold") && next !== undefined)) return choose(box);
    if (box) return show(next, node);
    if (frame && next !== undefined && target.tagName !== "rect") return show(next, node);
    choose(null);
  }

  stage.addEventListener("pointerup", release);
  stage.addEventListener("pointercancel", function () { pressed = null; stage.classList.remove("moving"); });
  stage.addEventListener("dblclick", function (event) {
    if (!event.target.closest(".box, .frame, .ow-details")) fit();
  });
  stage.addEventListener("keydown", function (event) {
    const middle = [stage.clientWidth / 2, stage.clientHeight / 2];
    const keys = {
      Escape: function () { choose(null); },
      "+": function () { zoom(1.25, middle[0], middle[1]); },
      "-": function () { zoom(0.8, middle[0], middle[1]); },
      "0": fit
    };
    if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
  });

  const tools = root.querySelector(".ow-tools"), all = make("button", "", "fit");
  all.onclick = fit;
  search.type = "search";
  search.placeholder = "find";
  search.oninput = find;
  search.onkeydown = function (event) { event.stopPropagation(); };
  tools.append(search, all);
  show(0);
  window.addEventListener("resize", fit);
}
