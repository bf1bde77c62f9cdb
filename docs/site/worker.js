// Runs the course's own Python: asked with {id, module, text}, it answers with what module.reply(text) says.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const ready = (async () => {
  const [python, zip] = await Promise.all([
    loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href }),
    fetch(new URL("./course.zip", import.meta.url)).then((found) => found.arrayBuffer()),
  ]);
  python.unpackArchive(zip, "zip", { extractDir: "/course" });
  python.runPython("import sys; sys.path.insert(0, '/course')");
  postMessage({ ready: true });
  return python;
})();

onmessage = async ({ data: { id, module, text } }) => {
  try {
    const python = await ready;
    postMessage({ id, said: python.pyimport(module).reply(text) });
  } catch (error) {
    postMessage({ id, failed: String(error) });
  }
};
ready.catch((error) => postMessage({ failed: String(error) }));
