// Browsers start no worker for a page that was opened from a folder. There the search runs in a hidden frame in place of a worker.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inside = this.frame.contentWindow
      addEventListener("message", (event) => {
        if (event.source === inside) {
          const message = new MessageEvent("message", { data: event.data })
          this.dispatchEvent(message)
          this.onmessage?.(message)
        }
      })
      const before =
        "postMessage = (message) => parent.postMessage(message, '*');" +
        "importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {" +
        "const script = document.createElement('script');" +
        "script.src = url; script.onload = done; script.onerror = failed; document.body.appendChild(script)" +
        "})), Promise.resolve())"
      inside.document.open()
      inside.document.write(`<!doctype html><body><script>${before}<\/script><script src="${url}"><\/script></body>`)
      inside.document.close()
      this.loaded = new Promise((done) => (this.frame.onload = done))
    }
    postMessage(message) {
      const event = new MessageEvent("message", { data: message })
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(event))
    }
    terminate() {
      this.frame.remove()
    }
  }
  window.IFrameWorker = IFrameWorker
  window.Worker = IFrameWorker
}
