// Checks the chat page in Chromium against a running server, and takes a picture of it.
//
//     npm install playwright-core
//     gemma4 serve --device cpu --port 8123 --name tiny &
//     node crates/gemma4-serve/tests/page.mjs http://127.0.0.1:8123 page.png

import assert from "node:assert";
import { mkdtempSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";

const [url, picture] = process.argv.slice(2);
// The package lies in the folder in which the script is started.
const { chromium } = createRequire(process.cwd() + "/")("playwright-core");
const profile = mkdtempSync(`${tmpdir()}/chromium-`);
const context = await chromium.launchPersistentContext(profile, {
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync"],
  viewport: { width: 900, height: 640 },
});
const page = await context.newPage();
const faults = [];
page.on("pageerror", (error) => faults.push(error.message));
page.on("console", (message) => message.type() === "error" && faults.push(message.text()));
const answers = page.locator(".assistant");
const last = answers.last();
const send = async (text) => { await page.fill("#input", text); await page.press("#input", "Enter"); };
const set = (name, value) => page.evaluate(([name, value]) => { document.getElementById(name).value = value; }, [name, value]);
const ended = () => page.locator("#stop").waitFor({ state: "hidden" });

await page.goto(url);
await page.waitForFunction(() => document.title !== "gemma4" || document.getElementById("model").textContent !== "");
assert.equal(await page.textContent("#model"), await page.title());

// A whole answer arrives, with its speed.
await set("max_tokens", "60");
await send("What is a <b>cache</b>?");
await ended();
assert.equal(await page.textContent(".user"), "What is a <b>cache</b>?", "markup is shown as text");
assert.match(await last.locator("footer").textContent(), /^\d+ tokens, [\d.]+ tokens\/s/);
assert.notEqual(await last.locator("div").last().textContent(), "");
assert(await last.locator("details").isHidden(), "an answer without thoughts shows none");

// An answer is stopped while it arrives, and the server stops too. The answer must not end before.
await page.route("**/v1/chat/completions", (route) => {
  const body = JSON.parse(route.request().postData());
  route.continue({ postData: JSON.stringify({ ...body, ignore_eos: true, max_tokens: 8000 }) });
});
await send("Count to a million.");
await page.waitForFunction(() => [...document.querySelectorAll(".assistant")].at(-1).textContent.length > 20);
await page.click("#stop");
await ended();
assert.equal(await last.locator("footer").textContent(), "stopped");
await page.unroute("**/v1/chat/completions");
await page.waitForFunction(async () => (await (await fetch("/metrics")).text()).includes("gemma4_running_answers 0"));

// The error of a wrong setting is shown, and the next message works.
await set("temperature", "9");
await send("Too hot");
await ended();
assert.match(await last.locator("footer.error").textContent(), /^temperature: is 9/);
assert.equal(await page.inputValue("#input"), "Too hot", "a refused message is not lost");
assert.notEqual(await page.locator(".user").last().textContent(), "Too hot", "a refused message is in the box alone");

// A new message in the box is not mixed with a refused one, which keeps a button.
let release;
const written = new Promise((resolve) => { release = resolve; });
await page.route("**/v1/chat/completions", async (route) => { await written; await route.continue(); });
await send("Still too hot");
await page.fill("#input", "Something new");
release();
await ended();
await page.unroute("**/v1/chat/completions");
assert.equal(await page.locator(".failed").count(), 0, "the error of an earlier message is gone");
assert.equal(await page.inputValue("#input"), "Something new");
const again = page.locator(".user").last().locator("button");
await again.click();
assert.equal(await page.textContent("#note"), "Send or clear the new message first.");
await page.fill("#input", "");
await again.click();
assert.equal(await page.inputValue("#input"), "Still too hot");
assert.equal(await again.count(), 0);
faults.splice(0, faults.length, ...faults.filter((fault) => !fault.includes("400")));
await set("temperature", "");
await set("max_tokens", "60");

// Images are attached and pasted, shown, removed and sent. The model in the program sees no images, and says so.
const png = Buffer.from("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC", "base64");
const file = (name, mimeType, buffer) => ({ name, mimeType, buffer });
const shown = page.locator("#attached img");
await page.setInputFiles("#files", [file("red.png", "image/png", png), file("a.gif", "image/gif", Buffer.from("GIF89a"))]);
await page.locator("#note:not(:empty)").waitFor();
assert.equal(await page.textContent("#note"), "a.gif is not a PNG, JPEG or WebP image.");
assert.equal(await shown.count(), 1);
await page.evaluate((bytes) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array([...bytes, 0])], "pasted.png", { type: "image/png" }));
  document.getElementById("input").dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, cancelable: true }));
}, [...png]);
await shown.nth(1).waitFor();
assert.equal(await page.textContent("#note"), "");
await page.locator("#attached button").nth(1).click();
assert.equal(await shown.count(), 1);
const sent = page.waitForRequest("**/v1/chat/completions");
await send("What is this?");
await ended();
const content = JSON.parse((await sent).postData()).messages.at(-1).content;
assert.deepEqual(content, [
  { type: "image_url", image_url: { url: `data:image/png;base64,${png.toString("base64")}` } },
  { type: "text", text: "What is this?" },
]);
assert.equal(await page.locator(".user img").count(), 0, "a refused message is in the box alone");
assert.match(await last.locator("footer.error").textContent(), /sees no images/);
assert.equal(await shown.count(), 1, "the image of a refused message is not lost");
assert.equal(await page.inputValue("#input"), "What is this?");
await page.locator("#attached button").click();

// A large image is scaled, and an image that is read after "New chat" is dropped.
const large = await page.evaluate(() => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [4000, 1000];
  canvas.getContext("2d").fillRect(0, 0, 4000, 1000);
  return canvas.toDataURL("image/jpeg").split(",")[1];
});
await page.setInputFiles("#files", [file("large.jpg", "image/jpeg", Buffer.from(large, "base64"))]);
await shown.waitFor();
await page.waitForFunction(() => document.querySelector("#attached img").complete);
assert.deepEqual(await shown.evaluate((image) => [image.naturalWidth, image.naturalHeight]), [1600, 400]);
assert.match(await shown.getAttribute("src"), /^data:image\/jpeg;base64,/);
await page.evaluate((bytes) => {
  attach([new File([new Uint8Array(bytes)], "late.png", { type: "image/png" })]);
  document.getElementById("reset").click();
}, [...png]);
await page.waitForFunction(() => reading === 0);
assert.equal(await shown.count(), 0);
faults.splice(0, faults.length, ...faults.filter((fault) => !fault.includes("400")));

// Thoughts are folded. The model in the program does not think, so this answer is prepared.
const chunk = (delta, reason = null) => `data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: reason }] })}\n\n`;
const usage = `data: ${JSON.stringify({ choices: [], usage: { completion_tokens: 9 } })}\n\n`;
await page.route("**/v1/chat/completions", (route) => route.fulfill({
  contentType: "text/event-stream",
  body: ": heartbeat\n\n" + chunk({ reasoning_content: "A cache keeps values. " }) + chunk({ reasoning_content: "So it is fast." })
    + chunk({ content: "A cache keeps results,\nso that they need not be computed again." }) + chunk({}, "stop") + usage + "data: [DONE]\n\n",
}));
await page.click("#reset");
assert.equal(await answers.count(), 0);
await page.setViewportSize({ width: 900, height: 420 });
await send("What is a cache?");
await ended();
const thoughts = last.locator("details");
assert(await thoughts.isVisible() && !(await thoughts.locator("div").isVisible()), "thoughts are folded");
await thoughts.locator("summary").click();
assert.equal(await thoughts.locator("div").textContent(), "A cache keeps values. So it is fast.");
await page.unroute("**/v1/chat/completions");
await last.locator("footer").scrollIntoViewIfNeeded();
if (picture) await page.screenshot({ path: picture });

await page.setViewportSize({ width: 360, height: 640 });
const overflow = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
assert(overflow <= 0, `a narrow page scrolls sideways by ${overflow} pixels`);
await page.click("#settings summary");
assert(await page.locator("#thinking").isVisible(), "the settings unfold");
if (picture) await page.screenshot({ path: picture.replace(/\.png$/, "-narrow.png") });

assert.deepEqual(faults, []);
await context.close();
console.log("the chat page works");
