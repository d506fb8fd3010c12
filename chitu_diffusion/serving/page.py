"""The built-in page: type a prompt, watch the steps, see the result. One file, nothing from other hosts."""

import json

from chitu_diffusion.models.spec import ModelSpec

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif;
  --accent: light-dark(#0b57d0, #a8c7fa); --on-accent: light-dark(#fff, #062e6f);
  --wrong: light-dark(#b3261e, #f2b8b5) }
main { max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
form, .row { display: grid; gap: 1rem } label { display: grid; gap: .25rem; font-size: .875rem }
.row { grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)) }
textarea, input, button { font: inherit; font-size: 1rem; box-sizing: border-box; width: 100%; min-width: 0;
  padding: .5rem .75rem; border: 1px solid light-dark(#767676, #8e8e8e); border-radius: .375rem }
textarea { resize: vertical } ::placeholder { color: inherit; opacity: .7 }
button { font-weight: 600; color: inherit; cursor: pointer } button:disabled { cursor: default; opacity: .6 }
#go { background: var(--accent); color: var(--on-accent); border-color: transparent }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px }
p { margin: 1rem 0; min-height: 1.5em } p:empty { display: none } #problem { color: var(--wrong); font-weight: 600 }
#work { display: grid; grid-template-columns: 1fr auto; gap: .75rem; align-items: center; margin: 1rem 0 }
#work[hidden] { display: none } progress { width: 100%; height: .75rem; accent-color: var(--accent) }
figure { margin: 1rem 0 } img, video { max-width: 100%; border-radius: .375rem } a { color: var(--accent) }
"""

_SCRIPT = """
const model = JSON.parse(document.getElementById("model").textContent), at = name => document.getElementById(name);
let running = null;
// read aloud, once: what changes the situation; the steps are beside their bar, for who looks or asks
const say = text => { if (at("message").textContent !== text) at("message").textContent = text; };
const step = (done, of) => {
  say("Generating."); at("work").hidden = false;
  at("bar").value = done / of; at("steps").textContent = model.video ? `${done} %` : `Step ${done} of ${of}`;
};
const headers = () => Object.assign({"content-type": "application/json"},
  model.locked ? {authorization: "Bearer " + at("token").value} : {});
async function ask(path, options = {}) {
  const answer = await fetch(path, {headers: headers(), signal: running.signal, ...options});
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new Error(told?.error?.message ?? `the server answered with ${answer.status}`);
}
function body() {
  const found = {prompt: at("prompt").value, model: model.name};
  for (const name of ["negative_prompt", "size", "num_inference_steps", "guidance_scale", "seed", "num_frames"])
    if (at(name) && at(name).value !== "")
      found[name] = at(name).type === "number" ? Number(at(name).value) : at(name).value;
  return found;
}
function show(kind, url, info) {
  const [made, figure, save] = [kind, "figure", "a"].map(name => document.createElement(name));
  made.src = save.href = url; made.id = "made";
  if (kind === "video") made.controls = made.loop = made.autoplay = made.muted = true;
  else made.alt = at("prompt").value;
  save.download = `${model.name}-${info.seed}.${model.video ? "mp4" : "png"}`; save.textContent = "Save the file";
  figure.append(made, document.createElement("br"), save);
  at("result").replaceChildren(figure);
  const ranks = `${info.ranks.length > 1 ? "ranks" : "rank"} ${info.ranks.join(", ")}`;
  say(`Done in ${info.seconds} s with seed ${info.seed}, on ${ranks}; attention: ${info.backend} (${info.reason}).`);
}
async function picture() {
  const answer = await ask("/v1/images/generations", {method: "POST", body: JSON.stringify({...body(), stream: true})});
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let done = false;
  for (let rest = "", part; !(part = await reader.read()).done;) {
    const events = (rest + part.value).split("\\n\\n");
    rest = events.pop();
    for (const event of events) {
      const data = JSON.parse(event.slice(event.indexOf("data: ") + 6));
      if (data.type === "error") throw new Error(data.error.message);
      if (data.b64_json) { show("img", "data:image/png;base64," + data.b64_json, data.chitu); done = true; }
      else if (data.status === "queued") say(`Waiting, ${data.ahead} before this one.`);
      else step(data.steps, data.of);
    }
  }
  if (!done) throw new Error("the connection ended before the picture was done");
}
async function video() {
  let job = await (await ask("/v1/videos", {method: "POST", body: JSON.stringify(body())})).json();
  const url = "/v1/videos/" + job.id;
  running.signal.addEventListener("abort", () => fetch(url, {method: "DELETE", headers: headers()}));
  while (["queued", "in_progress"].includes(job.status)) {
    if (job.status === "queued") say("Waiting."); else step(job.progress, 100);
    await new Promise(done => setTimeout(done, 300));
    job = await (await ask(url)).json();
  }
  if (job.error) throw new Error(job.error.message);
  show("video", URL.createObjectURL(await (await ask(url + "/content")).blob()), job.chitu);
}
// the button that cannot be pressed any more hands its focus to the one that can
function swap(from, to) {
  const focused = document.activeElement === at(from);
  at(from).disabled = true; at(to).disabled = false;
  if (focused) at(to).focus();
}
at("form").addEventListener("submit", async event => {
  event.preventDefault();
  running = new AbortController();
  swap("go", "stop"); at("problem").textContent = ""; say("Sent.");
  try { await (model.video ? video : picture)(); }
  catch (error) {
    say(error.name === "AbortError" ? "Stopped." : "");
    if (error instanceof TypeError) at("problem").textContent = "Error: the server does not answer";
    else if (error.name !== "AbortError") at("problem").textContent = "Error: " + error.message;
  }
  at("work").hidden = true;
  swap("stop", "go");
});
at("stop").addEventListener("click", () => running.abort());
at("prompt").addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit(at("go"));
});
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}, served by chitu</title><link rel="icon" href="data:,"><style>{style}</style></head>
<body><main><h1>{name}</h1>
<form id="form">
<label>Prompt<textarea id="prompt" rows="3" required autofocus></textarea></label>
<label>Negative prompt<input id="negative_prompt"></label>
<div class="row">{fields}</div>
<div class="row"><button id="go">Generate</button><button id="stop" type="button" disabled>Stop</button></div>
</form>
<p id="problem" role="alert"></p><p id="message" role="status"></p>
<div id="work" hidden><progress id="bar" max="1" aria-label="Progress"></progress><span id="steps"></span></div>
<div id="result"></div></main>
<script type="application/json" id="model">{model}</script><script>{script}</script>
</body></html>
"""

_SIZE = 'pattern="[0-9]+x[0-9]+" title="width and height in pixels, with an x between them"'
_FIELD = '<label>{label}<input id="{name}" type="{kind}" placeholder="{usual}" {more}></label>'


def page(spec: ModelSpec, *, locked: bool) -> str:
    """The page for ``spec``; with a field for the token where it is ``locked``."""
    usual, video = spec.defaults, spec.suffix == ".mp4"
    fields = [
        ("Size", "size", "text", f"{usual.width}x{usual.height}", _SIZE),
        *([("Frames", "num_frames", "number", str(usual.frames), 'min="1"')] if video else []),
        ("Steps", "num_inference_steps", "number", str(usual.steps), 'min="1"'),
        ("Guidance", "guidance_scale", "number", f"{usual.guidance:g}", 'min="0" step="any"'),
        ("Seed", "seed", "number", "random", 'min="0"'),
        *([("Token", "token", "password", "", "required")] if locked else []),
    ]
    inputs = "".join(
        _FIELD.format(label=label, name=name, kind=kind, usual=value, more=more)
        for label, name, kind, value, more in fields
    )
    model = json.dumps({"name": spec.name, "video": video, "locked": locked})
    return _PAGE.format(name=spec.name, style=_STYLE, fields=inputs, model=model, script=_SCRIPT)
