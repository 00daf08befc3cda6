//! The loading of an embedding model to a device.

use crate::device::Chosen;
use crate::model::progress_bar;
use crate::terminal::note;
use crate::{Dtype, Error};
use burn_gemma4::{EmbeddingGemma, LoadOptions};
use std::path::Path;

/// Loads the embedding model in a folder. A progress bar is shown on standard error if that is a terminal.
pub(crate) fn load(
    folder: &Path,
    chosen: &Chosen,
    dtype: Option<Dtype>,
) -> Result<EmbeddingGemma, Error> {
    let bar = progress_bar()?;
    let mut options = LoadOptions::new().on_progress(|loaded| {
        bar.set_length(loaded.total_bytes as u64);
        bar.set_position(loaded.bytes as u64);
        bar.set_message(loaded.tensor.to_string());
    });
    if let Some(dtype) = dtype {
        options = options.dtype(chosen.dtype(Some(dtype))?.burn());
    }
    let model = EmbeddingGemma::load(folder, &chosen.device, options)?;
    bar.finish_and_clear();
    if dtype == Some(Dtype::F16) {
        note(
            "note: activations of embedding models may exceed the range of f16; such a text is an error",
        );
    }
    Ok(model)
}
