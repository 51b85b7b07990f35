"use strict";
// Numbers as text for people.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

const count = (value) => whole.format(value);

function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(0)} k`;
  return value >= 100 || Number.isInteger(value) ? whole.format(value) : value.toFixed(1);
}

const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.01 ? 1 : 0)}%`;

function duration(seconds) {
  if (seconds >= 100) return `${whole.format(seconds)} s`;
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  const ms = 1000 * seconds;
  return `${ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
}

function speed(bytesPerSecond) {
  if (bytesPerSecond >= 1e9) return `${(bytesPerSecond / 1e9).toFixed(bytesPerSecond >= 1e11 ? 0 : 1)} GB/s`;
  if (bytesPerSecond >= 1e6) return `${(bytesPerSecond / 1e6).toFixed(0)} MB/s`;
  return `${(bytesPerSecond / 1e3).toFixed(0)} kB/s`;
}

function bytes(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} GB`;
  return `${(value / 1e6).toFixed(0)} MB`;
}
