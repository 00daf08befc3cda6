//! The options for loading a checkpoint, and the reports on the progress of loading.

use crate::model::placement::PerLayerTable;
use crate::op::device_memory::DeviceMemory;
use crate::quant::quantize::QuantTarget;
use burn::tensor::DType;

pub(super) type OnProgress<'a> = Box<dyn FnMut(LoadProgress<'_>) + 'a>;

/// Options for loading a checkpoint.
#[derive(Default)]
pub struct LoadOptions<'a> {
    pub(super) dtype: Option<DType>,
    pub(super) quantization: Quantization,
    pub(super) table: PerLayerTable,
    pub(super) memory: Option<DeviceMemory>,
    pub(super) on_progress: Option<OnProgress<'a>>,
}

/// The storage format of a model's large weights: linear layers, embeddings and the head. All other weights are never
/// quantized. If the row length of a large weight is not a multiple of the block size, the weight stays unquantized
/// too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Quantization {
    /// The checkpoint's own format. If the checkpoint's weights are quantized, the model can train only LoRA adapters.
    /// To train all weights, load the model as [`Whole`](Quantization::Whole).
    #[default]
    Stored,
    /// Unquantized weights: weights that are quantized in the checkpoint are dequantized.
    Whole,
    /// Weights that are unquantized in the checkpoint become blocks of 32 elements with 8 bits each, as llama.cpp defines Q8_0.
    Q8,
    /// Weights that are unquantized in the checkpoint become blocks of 32 elements with 4 bits each, as llama.cpp defines Q4_0.
    Q4,
}

impl Quantization {
    /// Returns the format to which the loader quantizes weights that are unquantized in the checkpoint. Returns `None`
    /// if such weights stay unquantized.
    pub(super) fn target(self) -> Option<QuantTarget> {
        match self {
            Self::Stored | Self::Whole => None,
            Self::Q8 => Some(QuantTarget::Q8),
            Self::Q4 => Some(QuantTarget::Q4),
        }
    }
}

/// The progress of loading.
#[derive(Clone, Copy, Debug)]
pub struct LoadProgress<'a> {
    /// The name of the tensor that has just been loaded.
    pub tensor: &'a str,
    /// The number of checkpoint bytes that have been loaded to the device.
    pub bytes: usize,
    /// The number of checkpoint bytes that the model needs.
    pub total_bytes: usize,
}

impl<'a> LoadOptions<'a> {
    /// Creates the default options, without progress reports. By default, the weights keep the checkpoint's dtype. On a
    /// CPU, and on devices that do not compute in this dtype, the loader casts the weights to f32.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the dtype to which the weights are cast. The model then computes in this dtype.
    ///
    /// The default on a CPU is f32, because bf16 is much slower on a CPU. In f16, activations beyond 65,504 overflow.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Sets the storage format of the weights. The default is [the checkpoint's format](Quantization::Stored).
    pub fn quantization(mut self, quantization: Quantization) -> Self {
        self.quantization = quantization;
        self
    }

    /// Sets whether the per-layer embedding table is placed in device memory or in host memory. The default is
    /// [automatic](PerLayerTable::Auto).
    pub fn per_layer_table(mut self, table: PerLayerTable) -> Self {
        self.table = table;
        self
    }

    /// Sets the amount of device memory that the loader may use. The default is the amount that the device reports.
    pub fn memory(mut self, memory: DeviceMemory) -> Self {
        self.memory = Some(memory);
        self
    }

    /// Sets a callback that runs after each loaded tensor.
    pub fn on_progress(mut self, on_progress: impl FnMut(LoadProgress<'_>) + 'a) -> Self {
        self.on_progress = Some(Box::new(on_progress));
        self
    }
}

impl std::fmt::Debug for LoadOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadOptions")
            .field("dtype", &self.dtype)
            .field("quantization", &self.quantization)
            .field("table", &self.table)
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}
