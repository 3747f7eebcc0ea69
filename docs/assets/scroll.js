// What is wider than the page, as code, a table or a picture, can be scrolled by keyboard too.
const reach = () => {
  for (const block of document.querySelectorAll("pre, pre > code, .md-typeset__scrollwrap, p:has(> img)")) {
    if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
  }
};
addEventListener("load", reach);
addEventListener("resize", reach);
