//! Tests `config.json` files with values that no model has. Each such value gives one clear error before any allocation,
//! indexing or division uses the value.

use crate::fixture::folder;
use burn_gemma4::{Gemma4Config, Gemma4Error};
use serde_json::{Value, json};
use std::fs;

/// Reads a fixture's configuration after replacing some fields. The path `a.b` selects the field `b` of the object `a`.
fn read(fixture: &str, changes: &[(&str, Value)]) -> Result<Gemma4Config, Gemma4Error> {
    let text =
        fs::read_to_string(folder(fixture).join("config.json")).expect("the file is readable");
    let mut config: Value = serde_json::from_str(&text).expect("the text is JSON");
    for (path, value) in changes {
        let field = path
            .split('.')
            .fold(&mut config, |node, key| &mut node[key]);
        *field = value.clone();
    }
    Gemma4Config::from_json(&config.to_string())
}

#[track_caller]
fn check(changes: &[(&str, Value)], words: &[&str]) {
    for fixture in ["dense-ple", "moe"] {
        let error = match read(fixture, changes) {
            Err(error) => error.to_string(),
            Ok(config) => panic!("{fixture}: {changes:?} make {config:?}"),
        };
        for word in words {
            assert!(error.contains(word), "{fixture} {changes:?}: {error}");
        }
    }
}

#[test]
fn config_token_outside_the_vocabulary_is_refused() {
    for (field, value, words) in [
        ("pad_token_id", json!(320), ["pad_token_id is 320", "320"]),
        (
            "bos_token_id",
            json!(4_000_000_000u32),
            ["bos_token_id", "320"],
        ),
        ("eos_token_id", json!(999), ["eos_token_id is 999", "320"]),
        (
            "eos_token_id",
            json!([1, 320]),
            ["eos_token_id is 320", "320"],
        ),
    ] {
        check(&[(field, value)], &words);
    }
}

/// A per-layer table with fewer rows than the vocabulary is refused. Every token needs a row in the per-layer table, as in
/// the token embedding table.
#[test]
fn config_short_per_layer_table_is_refused() {
    for rows in [0, 1, 319] {
        let changes = [
            ("vocab_size_per_layer_input", json!(rows)),
            ("hidden_size_per_layer_input", json!(16)),
        ];
        check(
            &changes,
            &["vocab_size_per_layer_input", "vocab_size is 320"],
        );
    }
    // A model without per-layer embeddings has no per-layer table, so the vocabulary size 0 of that table is valid.
    let changes = [
        ("vocab_size_per_layer_input", json!(0)),
        ("hidden_size_per_layer_input", json!(0)),
    ];
    read("dense-ple", &changes).expect("a model without per-layer inputs");
}

#[test]
fn config_absurd_number_of_layers_is_refused() {
    for layers in [
        json!(1e13),
        json!(10_000_000_000_000_u64),
        json!(100_000),
        json!(u64::MAX),
    ] {
        for types in [Value::Null, json!(["full_attention"])] {
            let changes = [
                ("num_hidden_layers", layers.clone()),
                ("layer_types", types),
            ];
            check(&changes, &[]);
        }
    }
    let changes = [
        ("num_hidden_layers", json!(10_000_000_000_000_u64)),
        ("layer_types", Value::Null),
    ];
    check(&changes, &["num_hidden_layers is 10000000000000"]);
}

#[test]
fn config_absurd_size_is_refused() {
    let huge = json!(1_u64 << 62);
    for field in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "sliding_window",
        "hidden_size_per_layer_input",
    ] {
        check(&[(field, huge.clone())], &[field, "4611686018427387904"]);
    }
    let experts = [
        ("enable_moe_block", json!(true)),
        ("num_experts", huge.clone()),
        ("top_k_experts", json!(2)),
        ("moe_intermediate_size", json!(16)),
    ];
    check(&experts, &["num_experts", "4611686018427387904"]);
    let [switch, _, top_k, _] = experts;
    let wide = [
        switch,
        ("num_experts", json!(8)),
        top_k,
        ("moe_intermediate_size", huge),
    ];
    check(&wide, &["moe_intermediate_size", "4611686018427387904"]);
}

/// Sizes whose product overflows are refused, although each size alone is possible.
#[test]
fn config_overflowing_product_of_sizes_is_refused() {
    let wide = json!(1_u64 << 30);
    let tables = [
        ("vocab_size", wide.clone()),
        ("vocab_size_per_layer_input", wide.clone()),
        ("hidden_size_per_layer_input", wide.clone()),
    ];
    check(
        &tables,
        &["vocab_size_per_layer_input", "hidden_size_per_layer_input"],
    );
    let embedding = [("vocab_size", wide.clone()), ("hidden_size", wide.clone())];
    let embedding = [&embedding[..], &tables[1..2]].concat();
    check(&embedding, &["vocab_size", "hidden_size"]);
    let experts = [
        ("enable_moe_block", json!(true)),
        ("num_experts", json!(1 << 20)),
        ("top_k_experts", json!(2)),
        ("moe_intermediate_size", wide.clone()),
        ("hidden_size", json!(1 << 12)),
    ];
    check(&experts, &["num_experts", "moe_intermediate_size"]);
}

/// If a field has a wrong type, the error names the field with its whole path.
#[test]
fn config_field_of_wrong_type_is_named_with_its_path() {
    for (field, value) in [
        ("eos_token_id", json!("1")),
        ("eos_token_id", json!([1, -1])),
        ("hidden_size", json!("wide")),
        ("head_dim", json!(2.5)),
        ("layer_types", json!({"0": "full_attention"})),
        ("rope_parameters.full_attention.rope_theta", json!("1e6")),
        ("per_layer_config", json!({"0": {"head_dim": "64"}})),
        ("dtype", json!(16)),
    ] {
        let path = match field {
            "per_layer_config" => "per_layer_config.0.head_dim",
            other => other,
        };
        check(
            &[(field, value.clone())],
            &[&format!("config.json: {path}: invalid type")],
        );
        let inside = format!("text_config.{field}");
        let found = read("dense-ple-mm-bf16", &[(&inside, value.clone())]);
        let error = found.expect_err("the input is refused").to_string();
        let expected = format!("config.json: text_config.{path}: invalid type");
        assert!(error.starts_with(&expected), "{value}: {error}");
    }
    let missing = read(
        "dense-ple-mm-bf16",
        &[("text_config", json!({"vocab_size": 3}))],
    );
    let error = missing.expect_err("the input is refused").to_string();
    assert!(
        error.starts_with("config.json: text_config: missing field"),
        "{error}"
    );
}

/// A configuration that scales RoPE in the older field `rope_scaling` is refused. A configuration with the RoPE type
/// `default` and a scaling factor is refused too, because Hugging Face Transformers would ignore the factor.
#[test]
fn config_rope_scaling_is_obeyed_or_refused() {
    for scaling in [
        json!({"rope_type": "linear", "factor": 8.0}),
        json!({"type": "yarn", "factor": 4.0}),
        json!({"factor": 2.0}),
        json!("linear"),
    ] {
        check(
            &[("rope_scaling", scaling.clone())],
            &["rope_scaling", "rope_parameters"],
        );
        for field in ["rope_scaling", "text_config.rope_scaling"] {
            let found = read("dense-ple-mm-bf16", &[(field, scaling.clone())]);
            let error = found.expect_err(field).to_string();
            assert!(error.contains("rope_scaling"), "{error}");
        }
    }
    for none in [
        Value::Null,
        json!({}),
        json!({"rope_type": "default"}),
        json!({"type": "default", "factor": 1.0}),
    ] {
        read("dense-ple", &[("rope_scaling", none)]).expect("the positions are not scaled");
    }
    for kind in ["sliding_attention", "full_attention"] {
        let rope = format!("rope_parameters.{kind}");
        let beside = |rope_type: Value, factor: Value| json!({"rope_type": rope_type, "rope_theta": 1e4, "factor": factor});
        for rope_type in [json!("default"), Value::Null] {
            let scaled = beside(rope_type.clone(), json!(8.0));
            check(
                &[(&rope, scaled)],
                &[&format!("{rope}.factor is 8"), "default"],
            );
            for factor in [json!(1.0), Value::Null] {
                read("moe", &[(&rope, beside(rope_type.clone(), factor))])
                    .expect("the factor 1 is allowed");
            }
        }
        let config = read("moe", &[(&rope, beside(json!("proportional"), json!(8.0)))]);
        let config = config.expect("the factor is allowed");
        let rope = match kind {
            "sliding_attention" => &config.sliding_rope,
            _ => &config.global_rope,
        };
        assert_eq!(rope.factor, 8.0);
    }
}

#[test]
fn config_rope_with_non_finite_angles_is_refused() {
    for kind in ["sliding_attention", "full_attention"] {
        for (field, values) in [
            ("rope_theta", &[0.0, -1.0, 1e-60, 1e300][..]),
            ("factor", &[0.0, -8.0, 1e-60, 1e300]),
            ("partial_rotary_factor", &[-0.5, 1.5]),
        ] {
            for value in values {
                let field = format!("rope_parameters.{kind}.{field}");
                let proportional = format!("rope_parameters.{kind}.rope_type");
                let changes = [
                    (&proportional[..], json!("proportional")),
                    (&field[..], json!(value)),
                ];
                check(&changes, &[&field]);
            }
        }
    }
}

#[test]
fn config_softcap_or_epsilon_out_of_range_is_refused() {
    for (field, values) in [
        ("final_logit_softcapping", &[0.0, -30.0, 1e-30, 1e30][..]),
        ("rms_norm_eps", &[0.0, -1e-6, 1e-60, 1e60]),
        ("initializer_range", &[-0.02, 1e60]),
    ] {
        for value in values {
            check(&[(field, json!(value))], &[field]);
        }
    }
    read("dense-ple", &[("final_logit_softcapping", Value::Null)]).expect("a softcap is optional");
}
