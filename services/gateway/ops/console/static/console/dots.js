// Dots that move along the arrows of the picture. They are drawn outside of preact: thirty times a second, and only while something flows.

import { dotsPerS } from "./flow.js";

const TRAVEL_S = 1.2, FRAME_MS = 33, DOTS_MAX = 150;
const SVG = "http://www.w3.org/2000/svg";

export class Dots {
  constructor(group) { Object.assign(this, { group, arrows: [], moving: [], due: new Map(), frame: 0, last: 0 }); }

  // arrows: as of `arrowsOf`, each with the path that was drawn for it. Dots of arrows that are gone or broken vanish.
  follow(arrows) {
    this.arrows = arrows.map((one) => ({ ...one, each: 1 / dotsPerS(one), length: 0 }));
    const kept = new Map(this.arrows.filter((one) => !one.broken).map((one) => [one.key, one]));
    this.moving = this.moving.filter((dot) => {
      const arrow = kept.get(dot.arrow.key);
      if (arrow) dot.arrow = arrow; else dot.circle.remove();
      return Boolean(arrow);
    });
    for (const one of this.arrows) {
      if (one.broken || one.each === Infinity) this.due.delete(one.key);
      // The first dot of an arrow comes at a moment of its own, so that not all of them start together.
      else if (!this.due.has(one.key)) this.due.set(one.key, Math.random() * Math.min(one.each, 1));
    }
    if (!this.frame && (this.due.size || this.moving.length)) { this.last = 0; this.frame = requestAnimationFrame((now) => this.draw(now)); }
  }

  stop() {
    cancelAnimationFrame(this.frame);
    this.moving.forEach((dot) => dot.circle.remove());
    Object.assign(this, { arrows: [], moving: [], due: new Map(), frame: 0 });
  }

  draw(now) {
    if (!this.due.size && !this.moving.length) { this.frame = 0; return; }
    this.frame = requestAnimationFrame((next) => this.draw(next));
    if (now - this.last < FRAME_MS) return;
    const passed = this.last ? Math.min(0.2, (now - this.last) / 1000) : 0;
    this.last = now;
    for (const arrow of this.arrows) if (this.due.has(arrow.key)) this.advance(arrow, passed);
    this.moving = this.moving.filter((dot) => this.move(dot, passed));
  }

  advance(arrow, passed) {
    let due = this.due.get(arrow.key) - passed;
    if (due <= 0) {
      due = Math.max(0, due + arrow.each);
      if (this.moving.length < DOTS_MAX) this.start(arrow);
    }
    this.due.set(arrow.key, Math.min(due, arrow.each));
  }

  start(arrow) {
    const circle = document.createElementNS(SVG, "circle");
    circle.setAttribute("r", "3.5");
    circle.setAttribute("class", arrow.kind);
    this.group.append(circle);
    this.moving.push({ arrow, circle, done: 0 });
  }

  // Returns whether the dot is still on its way.
  move(dot, passed) {
    const { path } = dot.arrow;
    const length = dot.arrow.length ||= path.getTotalLength();
    dot.done += passed / (TRAVEL_S * Math.max(1, length / 400));
    if (dot.done >= 1) { dot.circle.remove(); return false; }
    const place = path.getPointAtLength(dot.done * length);
    dot.circle.setAttribute("cx", place.x.toFixed(1));
    dot.circle.setAttribute("cy", place.y.toFixed(1));
    return true;
  }
}
