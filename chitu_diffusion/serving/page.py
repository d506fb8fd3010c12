"""The built-in page: type a prompt, watch the steps, see the result. One file, nothing from other hosts."""

import json

from chitu_diffusion.models.spec import ModelSpec

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
form { display: grid; gap: .75rem } label { display: grid; gap: .25rem; font-size: .875rem }
textarea, input, button { font: inherit; padding: .5rem; border: 1px solid #8888; border-radius: .375rem }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .75rem }
progress { width: 100% } img, video { max-width: 100%; border-radius: .375rem } #message { min-height: 1.5em }
"""

_SCRIPT = """
const model = JSON.parse(document.getElementById("model").textContent), at = name => document.getElementById(name);
let running = null;
const say = (text, done, of) => { at("message").textContent = text; at("bar").value = of ? done / of : 0; };
const headers = () => Object.assign({"content-type": "application/json"},
  model.locked ? {authorization: "Bearer " + at("token").value} : {});
async function ask(path, options = {}) {
  const answer = await fetch(path, {headers: headers(), signal: running.signal, ...options});
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  return answer;
}
function body() {
  const found = {prompt: at("prompt").value, model: model.name};
  for (const name of ["negative_prompt", "size", "num_inference_steps", "guidance_scale", "seed", "num_frames"])
    if (at(name) && at(name).value !== "")
      found[name] = at(name).type === "number" ? Number(at(name).value) : at(name).value;
  return found;
}
function show(kind, url, info) {
  const made = document.createElement(kind);
  made.src = url; made.id = "made";
  if (kind === "video") made.controls = made.loop = made.autoplay = made.muted = true;
  else made.alt = at("prompt").value;
  at("result").replaceChildren(made);
  const how = `on ranks ${info.ranks.join(", ")}, attention: ${info.backend} (${info.reason})`;
  say(`Done in ${info.seconds} s, seed ${info.seed}, ${how}.`, 1, 1);
}
async function picture() {
  const answer = await ask("/v1/images/generations", {method: "POST", body: JSON.stringify({...body(), stream: true})});
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part; !(part = await reader.read()).done;) {
    const events = (rest + part.value).split("\\n\\n");
    rest = events.pop();
    for (const event of events) {
      const data = JSON.parse(event.slice(event.indexOf("data: ") + 6));
      if (data.type === "error") throw new Error(data.error.message);
      if (data.b64_json) show("img", "data:image/png;base64," + data.b64_json, data.chitu);
      else if (data.status === "queued") say(`Waiting, ${data.ahead} before this one.`, 0, 1);
      else say(`Step ${data.steps} of ${data.of}.`, data.steps, data.of);
    }
  }
}
async function video() {
  let job = await (await ask("/v1/videos", {method: "POST", body: JSON.stringify(body())})).json();
  const url = "/v1/videos/" + job.id;
  running.signal.addEventListener("abort", () => fetch(url, {method: "DELETE", headers: headers()}));
  while (["queued", "in_progress"].includes(job.status)) {
    say(job.status === "queued" ? "Waiting." : `${job.progress} %`, job.progress, 100);
    await new Promise(done => setTimeout(done, 300));
    job = await (await ask(url)).json();
  }
  if (job.error) throw new Error(job.error.message);
  show("video", URL.createObjectURL(await (await ask(url + "/content")).blob()), job.chitu);
}
at("form").addEventListener("submit", async event => {
  event.preventDefault();
  running = new AbortController();
  at("go").disabled = true; at("stop").disabled = false;
  say("Sent.", 0, 1);
  try { await (model.video ? video : picture)(); }
  catch (error) { say(error.name === "AbortError" ? "Stopped." : error.message, 0, 1); }
  at("go").disabled = false; at("stop").disabled = true;
});
at("stop").addEventListener("click", () => running.abort());
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{name}</title><link rel="icon" href="data:,"><style>{style}</style></head>
<body><h1>{name}</h1>
<form id="form">
<label>Prompt<textarea id="prompt" rows="3" required autofocus></textarea></label>
<label>Negative prompt<input id="negative_prompt"></label>
<div class="row">{fields}</div>
<div class="row"><button id="go">Generate</button><button id="stop" type="button" disabled>Stop</button></div>
</form>
<p id="message" role="status"></p><progress id="bar" max="1" value="0" aria-label="Progress"></progress>
<div id="result"></div>
<script type="application/json" id="model">{model}</script><script>{script}</script>
</body></html>
"""

_FIELD = '<label>{label}<input id="{name}" type="{kind}" placeholder="{usual}" {more}></label>'


def page(spec: ModelSpec, *, locked: bool) -> str:
    """The page for ``spec``; with a field for the token where it is ``locked``."""
    usual, video = spec.defaults, spec.suffix == ".mp4"
    fields = [
        ("Size", "size", "text", f"{usual.width}x{usual.height}", 'pattern="[0-9]+x[0-9]+"'),
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
