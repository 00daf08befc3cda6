//! A model's weights into blocks, where they are.

use super::{
    Quantization,
    source::{PORTION, Source},
};
use crate::{
    Gemma4Error, Gemma4Model,
    model::layer::weight::AnyWeight,
    quantized::{layout::Layout, quantize::Target},
};
use burn::tensor::{DType, Int, Tensor};

impl Gemma4Model {
    /// Brings the weights into another form: what [`LoadOptions::quantization`](super::LoadOptions::quantization) does to those of a
    /// checkpoint. Those that are quantized already stay as they are, or become [whole](Quantization::Whole). One after the other is
    /// read to the host in parts.
    ///
    /// # Errors
    /// Where they cannot be read.
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

fn quantize(weight: &mut dyn AnyWeight, target: Target, dtype: DType) -> Result<(), Gemma4Error> {
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

/// The words of rows, about [`PORTION`] bytes of them on the host at a time.
fn words(rows: &Tensor<2>, target: Target, layout: Layout) -> Result<Tensor<2, Int>, Gemma4Error> {
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
