// The site's search runs in a worker, and browsers start none for a page that is opened as a file.
// There, the worker's script runs in a frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.ready = new Promise(resolve => {
        frame.onload = () => {
          const inside = frame.contentWindow
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = inside.document.createElement("script")
          script.src = url
          script.onload = () => resolve(inside)
          inside.document.body.append(script)
        }
      })
      document.body.append(frame)
    }

    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
