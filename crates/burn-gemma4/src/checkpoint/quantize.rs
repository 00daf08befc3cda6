//! Quantizes the weights of a model that is already on a device.

use super::{
    options::Quantization,
    source::{PORTION, Source},
};
use crate::error::Gemma4Error;
use crate::model::Gemma4Model;
use crate::model::layer::weight::AnyWeight;
use crate::quant::layout::Layout;
use crate::quant::quantize::QuantTarget;
use burn::tensor::{DType, Int, Tensor};

impl Gemma4Model {
    /// Converts the weights to another storage format. See
    /// [`LoadOptions::quantization`](super::LoadOptions::quantization).
    ///
    /// [`Whole`](Quantization::Whole) dequantizes weights that are quantized already. The other formats leave such
    /// weights unchanged.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be read from the device.
    pub fn quantize(mut self, quantization: Quantization) -> Result<Self, Gemma4Error> {
        let target = quantization.target();
        let dtype = self.dtype();
        for (_, weight) in self.weights_mut() {
            match target {
                Some(target) => quantize(weight, target, dtype)?,
                None if quantization == Quantization::Whole => weight.dequantize(),
                None => {}
            }
        }
        Ok(self)
    }
}

fn quantize(
    weight: &mut dyn AnyWeight,
    target: QuantTarget,
    dtype: DType,
) -> Result<(), Gemma4Error> {
    let Some(layout) = weight
        .whole_columns()
        .and_then(|columns| target.layout(columns))
    else {
        return Ok(());
    };
    let Some(rows) = weight.whole_rows() else {
        return Ok(());
    };
    let words = words(&rows, target, layout)?;
    drop(rows);
    weight.quantize(words, layout, dtype);
    Ok(())
}

/// Quantizes the rows of a matrix on the host, about [`PORTION`] bytes at a time. The function reads the rows from the
/// device, and uploads the packed 32-bit words to the device.
fn words(
    rows: &Tensor<2>,
    target: QuantTarget,
    layout: Layout,
) -> Result<Tensor<2, Int>, Gemma4Error> {
    let (device, dtype) = (rows.device(), rows.dtype());
    let [count, columns] = rows.dims();
    let at_once = (PORTION / (columns * dtype.size())).max(1);
    let options = (&device, DType::U32);
    let mut words = Tensor::<2, Int>::empty([count, layout.words()], options);
    for start in (0..count).step_by(at_once) {
        let part = at_once.min(count - start);
        let read = rows.clone().narrow(0, start, part).try_into_data();
        let read = read.map_err(|error| {
            Gemma4Error::Device(format!("the weights could not be read: {error}"))
        })?;
        let source = Source::floats(vec![part, columns], dtype, read.as_bytes());
        let part_words = Tensor::from_data(source.words(0..part, Some(target), layout), options);
        words = words.slice_assign([start..start + part, 0..layout.words()], part_words);
    }
    Ok(words)
}
