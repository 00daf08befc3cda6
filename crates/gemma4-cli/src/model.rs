//! The arguments that choose a Gemma 4 model, and notes about the model.

use crate::device_list::{DeviceList, DeviceListParser};
use crate::loading::Loaded;
use crate::terminal::note;
use crate::{Dtype, Error};
use burn::tensor::DType;
use burn_gemma4::{Gemma4Model, PerLayerTable, Quantization};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::PathBuf;

/// The arguments that choose the model and its device.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Model")]
pub struct ModelArguments {
    /// Checkpoint: a folder in Hugging Face's layout, a GGUF file, or the name of a model on the Hugging Face Hub, such
    /// as google/gemma-4-E2B-it. The model is downloaded if the Hub's cache lacks it. NAME:FILE.gguf takes one of
    /// several GGUF files [default: a tiny checkpoint that the program contains].
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Device to run on. NAME:NUMBER takes one of several devices, such as cuda:1. `serve` also takes a list, such as
    /// cuda:0,cuda:1.
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = DeviceListParser)]
    pub device: DeviceList,
    /// Compute type [default: the checkpoint's; on a CPU f32].
    #[arg(long, value_enum)]
    pub dtype: Option<Dtype>,
    /// Quantize unquantized weights during loading to blocks of 32 elements, as in llama.cpp's Q8_0 or Q4_0; `none` dequantizes
    /// quantized weights [default: the checkpoint's format].
    #[arg(long, value_enum, value_name = "FORM")]
    pub quantize: Option<WeightForm>,
    /// Memory that holds the per-layer embedding table, which is half of a small model's weights. Each token needs one row
    /// of the table.
    #[arg(
        long,
        value_enum,
        value_name = "PLACE",
        default_value_t,
        help_heading = "Memory"
    )]
    pub per_layer_table: Table,
}

/// The arguments that choose the model, its device and a LoRA adapter.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Model")]
pub struct AdaptedModelArguments {
    /// The arguments that choose the model and its device.
    #[command(flatten)]
    pub model: ModelArguments,
    /// Folder of a LoRA adapter. The adapter is merged into unquantized weights, and is applied separately to quantized
    /// layers.
    #[arg(long, value_name = "DIR", help_heading = "Model")]
    pub adapter: Option<PathBuf>,
}

impl AdaptedModelArguments {
    /// Loads the model and its adapter as [`ModelArguments::load`] does.
    ///
    /// # Errors
    /// Passes on the errors of [`ModelArguments::load`].
    pub fn load(&self) -> Result<Loaded, Error> {
        self.model.load(self.adapter.as_deref())
    }
}

/// The values of `--per-layer-table`: the memory that holds the per-layer embedding table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Table {
    /// Place the table on the device if it fits there together with the other weights, and on the host otherwise.
    #[default]
    Auto,
    /// Leave the table in the checkpoint's memory-mapped files. A token's row is uploaded when the token is processed.
    Host,
    /// Place the table on the device, in several parts if a device buffer is too small for it.
    Device,
}

impl From<Table> for PerLayerTable {
    fn from(table: Table) -> Self {
        match table {
            Table::Auto => Self::Auto,
            Table::Host => Self::Host,
            Table::Device => Self::Device,
        }
    }
}

impl Table {
    /// Prints where a model's per-layer embedding table is placed. A small table on the device is mentioned only if the user
    /// chose this placement.
    pub fn tell(self, model: &Gemma4Model) {
        /// The smallest table size in bytes for which the placement is printed.
        const LARGE: usize = 1 << 28;
        if let Some(placement) = model.per_layer_table()
            && (self != Self::Auto || placement.is_on_host || placement.bytes >= LARGE)
        {
            note(placement);
        }
    }
}

/// The values of `--quantize`: the format of a model's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightForm {
    /// Use unquantized weights.
    None,
    /// Use 8 bits per element, with one scale per 32 elements.
    Q8,
    /// Use 4 bits per element, with one scale per 32 elements.
    Q4,
}

impl From<WeightForm> for Quantization {
    fn from(form: WeightForm) -> Self {
        match form {
            WeightForm::None => Self::Whole,
            WeightForm::Q8 => Self::Q8,
            WeightForm::Q4 => Self::Q4,
        }
    }
}

/// Prints a note if the model computes in f32 although its checkpoint is in half precision. The note states the memory
/// of the weights, and the alternatives to f32.
pub fn tell_dtype(model: &Gemma4Model) {
    let Some(written) = model.written_dtype().and_then(Dtype::of) else {
        return;
    };
    if model.dtype() != DType::F32 || written == Dtype::F32 {
        return;
    }
    let memory = match model.is_quantized() {
        true => String::new(),
        false => format!(
            ", which takes {:.2} GB for the weights, twice the checkpoint's",
            model.parameter_bytes() as f64 / 1e9
        ),
    };
    note(format_args!(
        "note: the checkpoint is in {written}, and the model computes in f32{memory}; --dtype f16 halves that and is faster on a CPU if \
         no activation exceeds 65504, --dtype {written} keeps the checkpoint's dtype"
    ));
}

/// Returns a progress bar of bytes, which is shown on standard error if that is a terminal.
///
/// # Errors
/// Returns an error if the bar's constant template is invalid, which does not happen.
pub fn progress_bar() -> Result<ProgressBar, Error> {
    let style = "{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {wide_msg}";
    Ok(ProgressBar::new(0).with_style(ProgressStyle::with_template(style)?))
}
