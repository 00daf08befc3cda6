//! The options for exporting a quantized checkpoint: the form of the weights, and an importance matrix.

use crate::checkpoint::gguf::importance::ImportanceMatrix;
use crate::quant::blocks::BlockFormat;
use crate::quant::quantize::QuantTarget;
use std::fmt;

/// The form in which [`quantize_checkpoint`](crate::quantize_checkpoint) writes weights.
///
/// The K forms are mixtures of block formats, and exist in GGUF files only. Each tensor gets the format that llama.cpp's
/// quantizer chooses for the mixture of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExportForm {
    /// 8 bits: Q8_0 in GGUF, W8A16 in a folder.
    Q8,
    /// 4 bits: Q4_0 in GGUF, W4A16 in a folder.
    Q4,
    /// llama.cpp's `Q2_K`.
    Q2K,
    /// llama.cpp's `Q3_K_S`.
    Q3KSmall,
    /// llama.cpp's `Q3_K_M`.
    Q3KMedium,
    /// llama.cpp's `Q3_K_L`.
    Q3KLarge,
    /// llama.cpp's `Q4_K_S`.
    Q4KSmall,
    /// llama.cpp's `Q4_K_M`.
    Q4KMedium,
    /// llama.cpp's `Q5_K_S`.
    Q5KSmall,
    /// llama.cpp's `Q5_K_M`.
    Q5KMedium,
    /// llama.cpp's `Q6_K`.
    Q6K,
}

impl ExportForm {
    /// Returns the format of most tensors.
    pub(super) fn base(self) -> BlockFormat {
        match self {
            Self::Q8 => BlockFormat::Q8_0,
            Self::Q4 => BlockFormat::Q4_0,
            Self::Q2K => BlockFormat::Q2K,
            Self::Q3KSmall | Self::Q3KMedium | Self::Q3KLarge => BlockFormat::Q3K,
            Self::Q4KSmall | Self::Q4KMedium => BlockFormat::Q4K,
            Self::Q5KSmall | Self::Q5KMedium => BlockFormat::Q5K,
            Self::Q6K => BlockFormat::Q6K,
        }
    }

    /// Returns the value of the metadata key `general.file_type`.
    pub(super) fn file_type(self) -> usize {
        match self {
            Self::Q4 => 2,
            Self::Q8 => 7,
            Self::Q2K => 10,
            Self::Q3KSmall => 11,
            Self::Q3KMedium => 12,
            Self::Q3KLarge => 13,
            Self::Q4KSmall => 14,
            Self::Q4KMedium => 15,
            Self::Q5KSmall => 16,
            Self::Q5KMedium => 17,
            Self::Q6K => 18,
        }
    }

    /// Returns the format of the whole model, or `None` if the form is a mixture.
    pub(super) fn target(self) -> Option<QuantTarget> {
        match self {
            Self::Q8 => Some(QuantTarget::Q8),
            Self::Q4 => Some(QuantTarget::Q4),
            _ => None,
        }
    }
}

impl fmt::Display for ExportForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Q8 => "Q8_0",
            Self::Q4 => "Q4_0",
            Self::Q2K => "Q2_K",
            Self::Q3KSmall => "Q3_K_S",
            Self::Q3KMedium => "Q3_K_M",
            Self::Q3KLarge => "Q3_K_L",
            Self::Q4KSmall => "Q4_K_S",
            Self::Q4KMedium => "Q4_K_M",
            Self::Q5KSmall => "Q5_K_S",
            Self::Q5KMedium => "Q5_K_M",
            Self::Q6K => "Q6_K",
        })
    }
}

/// The options of [`quantize_checkpoint`](crate::quantize_checkpoint).
///
/// ```
/// use burn_gemma4::{ExportForm, ExportOptions};
///
/// let options = ExportOptions::from(ExportForm::Q4KMedium);
/// assert_eq!(options.form().to_string(), "Q4_K_M");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions<'a> {
    pub(super) form: ExportForm,
    pub(super) importance: Option<&'a ImportanceMatrix>,
}

impl From<ExportForm> for ExportOptions<'_> {
    fn from(form: ExportForm) -> Self {
        Self {
            form,
            importance: None,
        }
    }
}

impl<'a> ExportOptions<'a> {
    /// Returns the form of the weights.
    pub fn form(&self) -> ExportForm {
        self.form
    }

    /// Sets the importance matrix that weights the errors of quantization. It needs a GGUF file as the output, and a
    /// form other than [`Q8`](ExportForm::Q8). Without one, all channels of a matrix count by their weights alone.
    pub fn importance(mut self, importance: &'a ImportanceMatrix) -> Self {
        self.importance = Some(importance);
        self
    }
}
