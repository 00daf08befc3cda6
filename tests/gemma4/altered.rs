//! Copies of fixtures with changes.

use crate::fixture::folder;
use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};
use serde_json::Value;
use std::{fs, path::Path};

/// Copies a fixture and changes its `config.json`.
pub fn altered(fixture: &str, change: impl FnOnce(&mut Value), path: &Path) {
    for entry in fs::read_dir(folder(fixture)).expect("the fixture is readable") {
        let entry = entry.expect("the fixture is readable");
        fs::copy(entry.path(), path.join(entry.file_name())).expect("the file is copyable");
    }
    let path = path.join("config.json");
    let text = fs::read_to_string(&path).expect("the fixture is readable");
    let mut config = serde_json::from_str(&text).expect("the fixture parses");
    change(&mut config);
    fs::write(path, config.to_string()).expect("the file is writable");
}

/// Copies a fixture and changes the values of one of its bf16 tensors.
pub fn with_tensor(fixture: &str, name: &str, change: impl Fn(f32) -> f32, path: &Path) {
    altered(fixture, |_| (), path);
    let path = path.join("model.safetensors");
    let bytes = fs::read(&path).expect("the fixture is readable");
    let tensors = SafeTensors::deserialize(&bytes).expect("the fixture parses");
    let view = tensors.tensor(name).expect("the fixture has the tensor");
    assert_eq!(view.dtype(), Dtype::BF16);
    let numbers = view.data().as_chunks::<2>().0.iter();
    let numbers = numbers.map(|bytes| f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16));
    let numbers: Vec<u8> = numbers
        .flat_map(|number| ((change(number).to_bits() >> 16) as u16).to_le_bytes())
        .collect();
    let shape = view.shape().to_vec();
    let others = tensors
        .tensors()
        .into_iter()
        .filter(|(other, _)| other != name);
    let view = TensorView::new(Dtype::BF16, shape, &numbers).expect("the shape is unchanged");
    let views = others.chain([(name.to_owned(), view)]);
    let file = serialize(views, None).expect("the tensors are valid");
    fs::write(path, file).expect("the file is writable");
}
