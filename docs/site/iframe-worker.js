// Search in pages opened from disk (file:), where browsers start no workers: run the worker's script in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = `<script>self.postMessage = data => frameElement.receive(data)</script><script src="${url}"></script>`
      frame.receive = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const loaded = new Promise(resolve => frame.addEventListener("load", resolve))
      this.postMessage = data =>
        loaded.then(() => frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
      document.documentElement.appendChild(frame)
    }
  }
}
