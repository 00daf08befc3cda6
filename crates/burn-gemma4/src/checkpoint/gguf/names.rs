//! llama.cpp's names of the model's parameters.

/// The parameters outside of the layers. An entry holds a parameter's path and llama.cpp's name of the tensor.
const OF_MODEL: [(&str, &str); 6] = [
    ("embed_tokens.weight", "token_embd.weight"),
    (
        "embed_tokens_per_layer.weight",
        "per_layer_token_embd.weight",
    ),
    (
        "per_layer_model_projection.weight",
        "per_layer_model_proj.weight",
    ),
    (
        "per_layer_projection_norm.weight",
        "per_layer_proj_norm.weight",
    ),
    ("norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// The parameters of a layer. An entry holds a parameter's path without the prefix `layers.{i}.`, and llama.cpp's name
/// of the tensor without the prefix `blk.{i}.`.
const OF_LAYER: [(&str, &str); 25] = [
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("mlp.gate_proj.weight", "ffn_gate.weight"),
    ("mlp.up_proj.weight", "ffn_up.weight"),
    ("mlp.down_proj.weight", "ffn_down.weight"),
    ("input_layernorm.weight", "attn_norm.weight"),
    (
        "post_attention_layernorm.weight",
        "post_attention_norm.weight",
    ),
    ("pre_feedforward_layernorm.weight", "ffn_norm.weight"),
    ("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
    ("router.proj.weight", "ffn_gate_inp.weight"),
    ("router.scale", "ffn_gate_inp.scale"),
    ("router.per_expert_scale", "ffn_down_exps.scale"),
    ("experts.gate_up_proj", "ffn_gate_up_exps.weight"),
    ("experts.down_proj", "ffn_down_exps.weight"),
    (
        "post_feedforward_layernorm_1.weight",
        "post_ffw_norm_1.weight",
    ),
    (
        "post_feedforward_layernorm_2.weight",
        "post_ffw_norm_2.weight",
    ),
    (
        "pre_feedforward_layernorm_2.weight",
        "pre_ffw_norm_2.weight",
    ),
    ("per_layer_input_gate.weight", "inp_gate.weight"),
    ("per_layer_projection.weight", "proj.weight"),
    ("post_per_layer_input_norm.weight", "post_norm.weight"),
    ("layer_scalar", "layer_output_scale.weight"),
];

/// The path of the stacked parameter that holds the gate projections and up projections of all experts.
const GATE_UP: &str = "experts.gate_up_proj";
/// The names of the two tensors that may store [`GATE_UP`]: the first holds the gate projections, the second the up
/// projections.
const HALVES: [&str; 2] = ["ffn_gate_exps.weight", "ffn_up_exps.weight"];

/// Returns the names of the tensors that store the parameter at `path`. `has` returns true if the file contains a
/// tensor of the given name.
pub(in crate::checkpoint) fn in_file(path: &str, has: impl Fn(&str) -> bool) -> Vec<String> {
    let Some((layer, of_layer)) = layer_and_rest(path) else {
        return vec![named(&OF_MODEL, path).to_owned()];
    };
    let in_layer = |name: &str| format!("blk.{layer}.{name}");
    let halves = HALVES.map(in_layer);
    match of_layer == GATE_UP && halves.iter().any(|half| has(half)) {
        true => halves.into(),
        false => vec![in_layer(named(&OF_LAYER, of_layer))],
    }
}

/// Returns the index of the layer to which the parameter at `path` belongs, and the rest of the path.
pub(in crate::checkpoint) fn layer_and_rest(path: &str) -> Option<(usize, &str)> {
    let (layer, rest) = path.strip_prefix("layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}

/// Returns llama.cpp's name for the parameter at `path`. If `names` does not list the path, returns `path`.
fn named<'a>(names: &[(&str, &'a str)], path: &'a str) -> &'a str {
    match names.iter().find(|(ours, _)| *ours == path) {
        Some((_, theirs)) => theirs,
        None => path,
    }
}

/// Returns the index of the layer to which a tensor belongs, if the tensor is a K projection, a V projection or a K
/// norm. Returns `None` for any other tensor.
pub(super) fn layer_of_unread_keys(name: &str) -> Option<usize> {
    const UNREAD: [&str; 3] = ["attn_k.weight", "attn_v.weight", "attn_k_norm.weight"];
    let (layer, of_layer) = name.strip_prefix("blk.")?.split_once('.')?;
    UNREAD.contains(&of_layer).then(|| layer.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::stored;
    use crate::config::Gemma4Config;
    use crate::model::Gemma4Model;
    use burn::tensor::{DType, Device};

    /// Checks that the tables contain every parameter.
    #[test]
    fn in_file_for_every_parameter_gives_unique_tensor() {
        for config in [Gemma4Config::e2b(), Gemma4Config::moe_26b_a4b()] {
            let model = Gemma4Model::new(&config, &Device::default());
            let mut names = Vec::new();
            for (path, _) in stored(&model, DType::F32) {
                let tensors = in_file(&path, |_| false);
                let as_it_is = path.replace("layers.", "blk.");
                assert_ne!(tensors, [as_it_is]);
                names.extend(tensors);
            }
            let all = names.len();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), all);
        }
    }
}
