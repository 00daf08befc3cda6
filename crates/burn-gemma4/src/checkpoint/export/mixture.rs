//! Chooses the block format of each tensor in a GGUF file, as llama.cpp's `llama_tensor_get_type` does for Gemma 4.
//!
//! | tensor | format |
//! |---|---|
//! | `token_embd`, `per_layer_token_embd`, `output` | Q6_K; embeddings with a separate `output` have the base format |
//! | `attn_v`, `ffn_down`, `attn_output` | a larger format in some mixtures and layers, see below |
//! | `per_layer_model_proj` | not quantized |
//! | other matrices of the layers | the base format |
//!
//! Q8 and Q4 are not mixtures: every weight has the same format, except for Q4 with an importance matrix.

use super::options::ExportForm;
use crate::checkpoint::gguf::names;
use crate::config::Gemma4Config;
use crate::quant::blocks::BlockFormat;

/// The number of experts for which llama.cpp chooses larger formats for attention.
const EIGHT_EXPERTS: usize = 8;
/// The number of query heads per key head from which llama.cpp chooses Q4_K for V projections in Q2_K.
const MANY_QUERY_HEADS: usize = 4;

/// The choice of formats for one model.
pub(super) struct Mixture {
    form: ExportForm,
    has_importance: bool,
    num_layers: usize,
    /// The layers with a V projection in the checkpoint, in ascending order.
    value_layers: Vec<usize>,
    /// True if the head shares the token embedding's weights.
    is_tied: bool,
    query_heads_per_key_head: usize,
    num_experts: usize,
}

impl Mixture {
    /// `paths` are the paths of all weights in the checkpoint, including V projections that no layer uses.
    pub fn new<'a>(
        form: ExportForm,
        has_importance: bool,
        config: &Gemma4Config,
        paths: impl Iterator<Item = &'a str>,
    ) -> Self {
        let (mut value_layers, mut is_tied) = (Vec::new(), true);
        for path in paths {
            is_tied &= path != "lm_head.weight";
            if let (Some(layer), "self_attn.v_proj.weight") = split(path) {
                value_layers.push(layer);
            }
        }
        value_layers.sort_unstable();
        Self {
            form,
            has_importance,
            num_layers: config.num_layers(),
            value_layers,
            is_tied,
            query_heads_per_key_head: config.num_attention_heads / config.key_value_heads(0),
            num_experts: config
                .experts
                .as_ref()
                .map_or(0, |experts| experts.num_experts),
        }
    }

    /// Returns true if the weight at `path` is quantized in rows of a suitable length.
    pub fn is_quantized(&self, path: &str) -> bool {
        self.form.target().is_some() || path != "per_layer_model_projection.weight"
    }

    /// Returns the format of the weight at `path` with rows of `columns` elements. Returns `None` if the rows are not
    /// whole blocks of any suitable format.
    pub fn format(&self, path: &str, columns: usize) -> Option<BlockFormat> {
        let format = match self.form.target() {
            Some(_) => self.uniform(path),
            None => self.mixed(path, columns),
        };
        let is_whole = |format: &BlockFormat| columns.is_multiple_of(format.numbers());
        Some(format)
            .filter(is_whole)
            .or_else(|| smaller(format).filter(is_whole))
    }

    fn uniform(&self, path: &str) -> BlockFormat {
        match split(path) {
            // llama.cpp avoids large errors of Q4_0 with an importance matrix in the first layers.
            (Some(layer), "mlp.down_proj.weight" | "experts.down_proj")
                if self.form == ExportForm::Q4
                    && self.has_importance
                    && layer < self.num_layers / 8 =>
            {
                BlockFormat::Q4_1
            }
            _ => self.form.base(),
        }
    }

    fn mixed(&self, path: &str, columns: usize) -> BlockFormat {
        let base = self.form.base();
        match split(path) {
            (None, "lm_head.weight") => head(base, columns),
            (None, _) if self.is_tied => head(base, columns),
            (Some(layer), "self_attn.v_proj.weight") => self.values(layer),
            (Some(layer), "mlp.down_proj.weight" | "experts.down_proj") => self.down(layer),
            (Some(_), "self_attn.k_proj.weight") if self.num_experts == EIGHT_EXPERTS => {
                BlockFormat::Q8_0
            }
            (Some(_), "self_attn.o_proj.weight") => self.attention_output(),
            _ => base,
        }
    }

    fn values(&self, layer: usize) -> BlockFormat {
        if self.num_experts == EIGHT_EXPERTS {
            return BlockFormat::Q8_0;
        }
        let index = self.value_layers.partition_point(|other| *other < layer);
        match self.form {
            ExportForm::Q2K if self.query_heads_per_key_head >= MANY_QUERY_HEADS => {
                BlockFormat::Q4K
            }
            ExportForm::Q2K => BlockFormat::Q3K,
            ExportForm::Q3KMedium if index < 2 => BlockFormat::Q5K,
            ExportForm::Q3KMedium => BlockFormat::Q4K,
            ExportForm::Q3KLarge => BlockFormat::Q5K,
            ExportForm::Q4KSmall if index < 4 => BlockFormat::Q5K,
            ExportForm::Q4KMedium | ExportForm::Q5KMedium
                if has_more_bits(index, self.value_layers.len()) =>
            {
                BlockFormat::Q6K
            }
            form => form.base(),
        }
    }

    fn down(&self, layer: usize) -> BlockFormat {
        let layers = self.num_layers;
        match self.form {
            ExportForm::Q2K => BlockFormat::Q3K,
            ExportForm::Q3KMedium if layer < layers / 16 => BlockFormat::Q5K,
            ExportForm::Q3KMedium => BlockFormat::Q4K,
            ExportForm::Q3KLarge => BlockFormat::Q5K,
            ExportForm::Q4KSmall if layer < layers / 8 => BlockFormat::Q5K,
            ExportForm::Q4KMedium | ExportForm::Q5KMedium if has_more_bits(layer, layers) => {
                BlockFormat::Q6K
            }
            form => form.base(),
        }
    }

    fn attention_output(&self) -> BlockFormat {
        if self.num_experts == EIGHT_EXPERTS {
            return match self.form {
                ExportForm::Q3KLarge => self.form.base(),
                form if matches!(form.base(), BlockFormat::Q5K | BlockFormat::Q6K) => form.base(),
                _ => BlockFormat::Q5K,
            };
        }
        match self.form {
            ExportForm::Q2K => BlockFormat::Q3K,
            ExportForm::Q3KMedium => BlockFormat::Q4K,
            ExportForm::Q3KLarge => BlockFormat::Q5K,
            form => form.base(),
        }
    }
}

/// Returns the index of the layer, if the weight belongs to a layer, and the rest of the path.
fn split(path: &str) -> (Option<usize>, &str) {
    match names::layer_and_rest(path) {
        Some((layer, rest)) => (Some(layer), rest),
        None => (None, path),
    }
}

/// Returns the format of the head, and of embeddings that share the head's weights.
fn head(base: BlockFormat, columns: usize) -> BlockFormat {
    match columns.is_multiple_of(base.numbers()) {
        true => BlockFormat::Q6K,
        false => BlockFormat::Q8_0,
    }
}

/// Returns true for the first eighth and the last eighth of the layers, and for every third layer between.
fn has_more_bits(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

/// Returns llama.cpp's format of 32 elements per block for rows that are not multiples of 256.
fn smaller(format: BlockFormat) -> Option<BlockFormat> {
    match format {
        BlockFormat::Q2K | BlockFormat::Q3K => Some(BlockFormat::Q4_0),
        BlockFormat::Q4K => Some(BlockFormat::Q5_0),
        BlockFormat::Q5K => Some(BlockFormat::Q5_1),
        BlockFormat::Q6K => Some(BlockFormat::Q8_0),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::gguf::types::Encoding;
    use crate::checkpoint::loader::Expected;
    use crate::config::{ExpertsConfig, LayerType};
    use crate::model::Gemma4Model;
    use burn::module::Module;
    use burn::tensor::Device;
    use serde_json::Value;
    use std::collections::{BTreeMap, BTreeSet};

    const FORMS: [ExportForm; 9] = [
        ExportForm::Q2K,
        ExportForm::Q3KSmall,
        ExportForm::Q3KMedium,
        ExportForm::Q3KLarge,
        ExportForm::Q4KSmall,
        ExportForm::Q4KMedium,
        ExportForm::Q5KSmall,
        ExportForm::Q5KMedium,
        ExportForm::Q6K,
    ];

    /// The models of `tests/fixtures/gguf/make_mixtures.py`.
    fn config(name: &str) -> Gemma4Config {
        let layers = |period: usize, count: usize| -> Vec<LayerType> {
            let kind = |layer: usize| match (layer + 1).is_multiple_of(period) {
                true => LayerType::Full,
                false => LayerType::Sliding,
            };
            (0..count).map(kind).collect()
        };
        let wide = Gemma4Config {
            vocab_size: 320,
            hidden_size: 256,
            intermediate_size: 256,
            num_attention_heads: 8,
            sliding_head_dim: 32,
            global_head_dim: 64,
            ..Gemma4Config::e2b()
        };
        let experts = |num_experts, moe_intermediate_size, count| Gemma4Config {
            num_key_value_heads: 2,
            num_global_key_value_heads: 1,
            layer_types: layers(6, count),
            experts: Some(ExpertsConfig {
                num_experts,
                top_k_experts: 2,
                moe_intermediate_size,
            }),
            vocab_size: 320,
            hidden_size: 256,
            intermediate_size: 256,
            num_attention_heads: 8,
            sliding_head_dim: 32,
            global_head_dim: 64,
            ..Gemma4Config::moe_26b_a4b()
        };
        match name {
            "E2B" => Gemma4Config {
                vocab_size_per_layer_input: 320,
                num_key_value_heads: 1,
                num_global_key_value_heads: 1,
                layer_types: layers(5, 35),
                num_kv_shared_layers: 20,
                hidden_size_per_layer_input: 32,
                ..wide
            },
            "26B-A4B" => experts(16, 32, 30),
            "8 experts" => experts(8, 256, 6),
            _ => panic!("{name}: the model is not in the script"),
        }
    }

    /// Checks the type of every matrix in every mixture against the types that llama.cpp's quantizer has chosen.
    #[test]
    fn format_of_every_tensor_equals_llama_cpp() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/gguf");
        let file = std::fs::read(format!("{folder}/mixtures.json")).expect("the fixture exists");
        let file: Value = serde_json::from_slice(&file).expect("the fixture is JSON");
        let models: BTreeMap<String, BTreeMap<String, BTreeMap<String, BTreeSet<String>>>> =
            serde_json::from_value(file["types"].clone()).expect("the fixture has types");
        assert_eq!(models.len(), 3);
        for (model, mixtures) in models {
            let config = config(&model);
            let mut module = Gemma4Model::new(&config, &Device::default());
            let mut expected = Expected::default();
            module.visit(&mut expected);
            let large: BTreeSet<String> = module
                .weights_mut()
                .into_iter()
                .map(|(path, _)| path)
                .collect();
            for form in FORMS {
                let paths = large.iter().map(String::as_str);
                let mixture = Mixture::new(form, false, &config, paths);
                let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
                for (path, shape) in &expected.parameters {
                    if large.contains(path) && mixture.is_quantized(path) {
                        let columns = shape.last().copied().unwrap_or(0);
                        let format = mixture.format(path, columns).expect("rows of whole blocks");
                        if format != form.base() {
                            let names = found.entry(Encoding::Blocks(format).name()).or_default();
                            names.extend(names::in_file(path, |_| false));
                        }
                    }
                }
                assert_eq!(found, mixtures[&form.to_string()], "{model}, {form}");
            }
        }
    }
}
