// Files that are sent with a message: images as they are, text and the text of PDF files as part of the message.

const IMAGE_BYTES = 10 * 2 ** 20, TEXT_BYTES = 2 ** 20, PDF_BYTES = 50 * 2 ** 20;

const asDataUrl = (file) => new Promise((done, fail) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => fail(new Error(`${file.name} cannot be read.`));
  reader.readAsDataURL(file);
});

const check = (file, most) => { if (file.size > most) throw new Error(`${file.name} is larger than ${most / 2 ** 20} MiB.`); };

// Returns {image} or {file: {name, text}}. takesImages: whether the model does; throws an Error with what to do.
export async function attachment(file, takesImages) {
  if (file.type.startsWith("image/")) {
    if (!takesImages) throw new Error(`${file.name}: this model takes no images. Choose a model that does, of a server that was started with --enable-mm.`);
    check(file, IMAGE_BYTES);
    return { image: await asDataUrl(file) };
  }
  if (file.type.startsWith("audio/") || file.type.startsWith("video/")) throw new Error(`${file.name}: models here take text and images, no sound and no video.`);
  if (file.type === "application/pdf" || file.name.toLowerCase().endsWith(".pdf")) {
    check(file, PDF_BYTES);
    return { file: { name: file.name, text: await textOfPdf(file) } };
  }
  check(file, TEXT_BYTES);
  const text = await file.text();
  if (text.includes("\0") || text.includes("\ufffd")) throw new Error(`${file.name} is no text in UTF-8.`);
  return { file: { name: file.name, text } };
}

async function textOfPdf(file) {
  const pdf = await import("../vendor/pdf.js");
  pdf.GlobalWorkerOptions.workerSrc = new URL("../vendor/pdf.worker.js", import.meta.url).href;
  const task = pdf.getDocument({ data: await file.arrayBuffer(), isEvalSupported: false, useSystemFonts: true });
  try {
    const found = await task.promise;
    const pages = [];
    for (let number = 1; number <= found.numPages; number++) {
      const { items } = await (await found.getPage(number)).getTextContent();
      pages.push(items.map(({ str = "", hasEOL }) => str + (hasEOL ? "\n" : "")).join(""));
    }
    const text = pages.join("\n\n").trim();
    if (!text) throw new Error("it has no text, only images of it");
    return text;
  } catch (failure) {
    throw new Error(`${file.name} cannot be read: ${failure.message}.`);
  } finally {
    task.destroy();
  }
}
