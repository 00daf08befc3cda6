//! PEFT's `adapter_config.json`, which holds the rank and scale of each adapted matrix.

use crate::{escaped::Escaped, json};
use fancy_regex::Regex;
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::{Map, Value};
use std::{fmt, marker::PhantomData};

/// The fields of `adapter_config.json` that this crate reads. `others` holds all remaining fields of the file.
#[derive(Deserialize)]
struct File {
    peft_type: String,
    r: usize,
    lora_alpha: f64,
    use_rslora: Option<bool>,
    rank_pattern: Option<Pairs<usize>>,
    alpha_pattern: Option<Pairs<f64>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// The fields that this crate may ignore, because they do not change how a trained adapter's `A` and `B` are applied.
const WITHOUT_EFFECT: [&str; 20] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];

/// The supported names of methods by which PEFT initializes `A` and `B`. All other named methods subtract the initial
/// `B · A` from the base weights. An adapter that was trained on such changed base weights does not fit the original
/// weights.
const BEGINNINGS: [&str; 4] = ["gaussian", "orthogonal", "eva", "mica"];

/// The contents of an adapter's `adapter_config.json`.
pub(super) struct AdapterConfig {
    rank: usize,
    alpha: f64,
    is_rank_stabilized: bool,
    ranks: Patterns<usize>,
    alphas: Patterns<f64>,
    /// Warnings about fields that this crate does not know.
    pub(super) warnings: Vec<String>,
}

/// The rank and scale of the adapter of one matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scaling {
    pub rank: usize,
    /// The scale by which `B · A` is multiplied.
    pub scale: f64,
}

impl AdapterConfig {
    /// Parses the contents of an `adapter_config.json`.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let file: File = json::from_slice(bytes)?;
        file.refuse_unsupported()?;
        let warnings = file.warnings();
        let config = Self {
            rank: file.r,
            alpha: file.lora_alpha,
            is_rank_stabilized: file.use_rslora.unwrap_or(false),
            ranks: Patterns::compile("rank_pattern", file.rank_pattern)?,
            alphas: Patterns::compile("alpha_pattern", file.alpha_pattern)?,
            warnings,
        };
        config.validate()?;
        Ok(config)
    }

    fn validate(&self) -> Result<(), String> {
        if self.rank == 0 {
            return Err("r is 0".into());
        }
        if let Some(pattern) = self.ranks.find(|rank| rank == 0) {
            return Err(format!("rank_pattern.{pattern} is 0"));
        }
        let is_finite = |alpha: f64| (alpha as f32).is_finite();
        if !is_finite(self.alpha) {
            return Err(format!(
                "lora_alpha {} over r {} is not a finite number in f32",
                self.alpha, self.rank
            ));
        }
        match self.alphas.find(|alpha| !is_finite(alpha)) {
            Some(pattern) => Err(format!(
                "alpha_pattern.{pattern} is not a finite number in f32"
            )),
            None => Ok(()),
        }
    }

    /// Returns the rank and scale of the adapter of one matrix. `module` is the full name of the matrix's module in the
    /// model that PEFT adapted.
    pub fn scaling(&self, module: &str) -> Result<Scaling, String> {
        let rank = self.ranks.value(module)?.unwrap_or(self.rank);
        let alpha = self.alphas.value(module)?.unwrap_or(self.alpha);
        let divisor = match self.is_rank_stabilized {
            true => (rank as f64).sqrt(),
            false => rank as f64,
        };
        let scale = alpha / divisor;
        Ok(Scaling { rank, scale })
    }
}

impl File {
    fn refuse_unsupported(&self) -> Result<(), String> {
        if self.peft_type != "LORA" {
            return Err(format!(
                "peft_type is {:?}; only \"LORA\" is supported",
                self.peft_type
            ));
        }
        for (name, value) in self.switches() {
            if is_on(value) {
                return Err(format!("{name} is {value}, which is not supported"));
            }
        }
        match self.others.get("init_lora_weights") {
            Some(Value::String(way)) if !BEGINNINGS.contains(&way.as_str()) => Err(format!(
                "init_lora_weights is {way:?}, with which PEFT changes the base weights; convert the adapter to one of the original base weights"
            )),
            _ => Ok(()),
        }
    }

    /// Returns a warning for each unknown field whose value is a number other than 0. PEFT writes numbers even for
    /// features that are off, so a number does not prove that an unsupported feature is on.
    fn warnings(&self) -> Vec<String> {
        let numbers = self
            .switches()
            .filter(|(_, value)| value.as_f64().is_some_and(|number| number != 0.0));
        numbers
            .map(|(name, value)| {
                let name = Escaped::line(name);
                format!(
                    "adapter_config.json: {name} is {value}, which is an unknown field and has no effect"
                )
            })
            .collect()
    }

    /// Returns the fields that may change how `A` and `B` are applied.
    fn switches(&self) -> impl Iterator<Item = (&String, &Value)> {
        let fields = self.others.iter();
        fields.filter(|(name, _)| !WITHOUT_EFFECT.contains(&name.as_str()))
    }
}

/// True if a field's value switches a feature on. A number counts as off, because PEFT writes numbers even for features
/// that are off.
fn is_on(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) | Value::Number(_) => false,
        Value::Bool(true) => true,
        Value::String(text) => !["", "none"].contains(&text.as_str()),
        Value::Array(values) => !values.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
    }
}

/// Maps regular expressions to values. A module gets the value of the first expression that matches the module's name.
struct Patterns<V> {
    field: &'static str,
    values: Vec<(String, Regex, V)>,
}

impl<V: Copy> Patterns<V> {
    fn compile(field: &'static str, pairs: Option<Pairs<V>>) -> Result<Self, String> {
        let pairs = pairs.map_or_else(Vec::new, |pairs| pairs.0);
        let compile = |(pattern, value): (String, V)| {
            // The expression matches a module name completely, or matches complete dot-separated parts at the end of
            // the name, as in PEFT's `get_pattern_key`.
            let regex = Regex::new(&format!(r"^(.*\.)?({pattern})$")).map_err(|error| {
                format!("{field}: {pattern:?} is not a supported regular expression: {error}")
            })?;
            Ok((pattern, regex, value))
        };
        let values = pairs
            .into_iter()
            .map(compile)
            .collect::<Result<_, String>>()?;
        Ok(Self { field, values })
    }

    fn value(&self, module: &str) -> Result<Option<V>, String> {
        for (pattern, regex, value) in &self.values {
            let is_match = regex
                .is_match(module)
                .map_err(|error| format!("{}: {pattern:?}: {error}", self.field))?;
            if is_match {
                return Ok(Some(*value));
            }
        }
        Ok(None)
    }

    /// Returns the first pattern whose value satisfies the predicate.
    fn find(&self, is_such: impl Fn(V) -> bool) -> Option<&str> {
        let mut values = self.values.iter();
        let (pattern, ..) = values.find(|(_, _, value)| is_such(*value))?;
        Some(pattern)
    }
}

/// The fields of a JSON object in the file's order.
struct Pairs<V>(Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Pairs<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PairsVisitor(PhantomData))
    }
}

struct PairsVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for PairsVisitor<V> {
    type Value = Pairs<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object that maps module names to numbers")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut pairs: Vec<(String, V)> = Vec::new();
        while let Some((name, value)) = map.next_entry::<String, V>()? {
            // Treat a repeated key as Python does: the key keeps the position of its first occurrence, and gets the
            // value of its last occurrence.
            match pairs.iter_mut().find(|(known, _)| *known == name) {
                Some((_, known)) => *known = value,
                None => pairs.push((name, value)),
            }
        }
        Ok(Pairs(pairs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const Q_PROJ: &str = "model.layers.1.self_attn.q_proj";

    fn parse(fields: Value) -> Result<AdapterConfig, String> {
        let mut config = json!({"peft_type": "LORA", "r": 8, "lora_alpha": 16});
        for (name, value) in fields
            .as_object()
            .expect("the test's fields are a JSON object")
        {
            config[name] = value.clone();
        }
        AdapterConfig::parse(config.to_string().as_bytes())
    }

    fn scaling(fields: Value) -> (usize, f64) {
        let config = parse(fields).expect("the configuration parses");
        let Scaling { rank, scale } = config
            .scaling(Q_PROJ)
            .expect("every pattern matches without error");
        (rank, scale)
    }

    #[test]
    fn scaling_with_and_without_rslora_divides_by_sqrt_rank_or_rank() {
        assert_eq!(scaling(json!({})), (8, 2.0));
        assert_eq!(scaling(json!({"use_rslora": false})), (8, 2.0));
        let stable = json!({"use_rslora": true, "r": 16, "lora_alpha": 12});
        assert_eq!(scaling(stable), (16, 3.0));
        let stable = json!({"use_rslora": true, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 5}});
        assert_eq!(scaling(stable), (4, 2.5));
    }

    #[test]
    fn pattern_matches_complete_trailing_parts_of_module_name() {
        for (pattern, matches) in [
            ("q_proj", true),
            ("self_attn.q_proj", true),
            ("model.layers.1.self_attn.q_proj", true),
            ("^model.layers.1.self_attn.q_proj", true),
            (r"layers\.\d+\.self_attn\.q_proj", true),
            (r".*\.q_proj", true),
            ("k_proj|q_proj", true),
            (r"(?<!2\.self_attn\.)q_proj", true),
            // A pattern must match complete dot-separated parts at the end of a name, so `proj` does not match `q_proj`.
            ("proj", false),
            ("attn.q_proj", false),
            ("layers.1.self_attn.q_pro", false),
            ("layers.1", false),
            ("^layers.1.self_attn.q_proj", false),
            ("Q_PROJ", false),
            ("", false),
        ] {
            let found = scaling(json!({"rank_pattern": {pattern: 3}}));
            let expected = if matches { (3, 16.0 / 3.0) } else { (8, 2.0) };
            assert_eq!(found, expected, "{pattern}");
        }
    }

    #[test]
    fn scaling_with_several_matching_patterns_uses_first_in_file() {
        let text = r#"{"peft_type": "LORA", "r": 8, "lora_alpha": 16,
            "rank_pattern": {"v_proj": 1, "self_attn.q_proj": 2, "q_proj": 4, "a": 9},
            "alpha_pattern": {"q_proj": 6, "model.layers.1.self_attn.q_proj": 7}}"#;
        let config = AdapterConfig::parse(text.as_bytes()).expect("the configuration parses");
        let found = config
            .scaling(Q_PROJ)
            .expect("every pattern matches without error");
        assert_eq!(
            found,
            Scaling {
                rank: 2,
                scale: 3.0
            }
        );
        let other = config.scaling("model.layers.1.mlp.up_proj");
        assert_eq!(
            other.expect("every pattern matches without error"),
            Scaling {
                rank: 8,
                scale: 2.0
            }
        );
    }

    #[test]
    fn parse_of_enabled_switch_fails_with_its_name() {
        for (name, value) in [
            ("use_dora", json!(true)),
            ("bias", json!("all")),
            ("bias", json!("lora_only")),
            ("lora_bias", json!(true)),
            ("fan_in_fan_out", json!(true)),
            ("modules_to_save", json!(["lm_head"])),
            ("target_parameters", json!(["mlp.experts.gate_up_proj"])),
            ("trainable_token_indices", json!([5])),
            ("trainable_token_indices", json!({"embed_tokens": [5]})),
            ("layer_replication", json!([[0, 4], [2, 6]])),
            ("alora_invocation_tokens", json!([3, 4])),
            ("use_qalora", json!(true)),
            ("use_bdlora", json!({"target_modules_bd_a": ["q_proj"]})),
            ("arrow_config", json!({"top_k": 3})),
            ("kasa_config", json!({"beta": 1e-4})),
            ("monteclora_config", json!({"samples": 8})),
            ("ensure_weight_tying", json!(true)),
            ("a_switch_to_come", json!(true)),
            ("a_kind_to_come", json!("new")),
            ("init_lora_weights", json!("pissa_niter_4")),
            ("rank_pattern", json!({"q_proj": 0})),
            ("rank_pattern", json!({"q_proj": -1})),
            ("rank_pattern", json!({"(": 1})),
            ("rank_pattern", json!(["q_proj"])),
            ("alpha_pattern", json!({"q_proj": 1e300})),
            ("alpha_pattern", json!({"q_proj": "1"})),
            ("use_rslora", json!("yes")),
            ("r", json!(0)),
            ("r", json!(2.5)),
            ("peft_type", json!("LOHA")),
        ] {
            let Err(reason) = parse(json!({name: value})) else {
                panic!("{name}: {value} was accepted");
            };
            assert!(reason.contains(name), "{name}: {reason}");
        }
    }

    /// Checks that a configuration with every switch off parses without a warning. The fields are those that PEFT 0.21
    /// writes for `LoraConfig()`, plus four unknown fields.
    #[test]
    fn parse_of_disabled_switches_succeeds() {
        let off = r#"{
            "task_type": null, "auto_mapping": null, "peft_version": "0.21.2", "base_model_name_or_path": null,
            "revision": null, "inference_mode": true, "target_modules": ["v_proj", "q_proj"], "exclude_modules": null,
            "lora_dropout": 0.05, "fan_in_fan_out": false, "bias": "none", "use_rslora": false, "modules_to_save": null,
            "init_lora_weights": true, "layers_to_transform": [0, 1], "layers_pattern": "layers", "rank_pattern": {},
            "alpha_pattern": {}, "megatron_config": null, "megatron_core": "megatron.core", "trainable_token_indices": null,
            "loftq_config": {}, "eva_config": null, "corda_config": null, "lora_ga_config": null, "use_dora": false,
            "velora_config": null, "alora_invocation_tokens": null, "use_qalora": false, "qalora_group_size": 16,
            "monteclora_config": null, "layer_replication": null, "lora_bias": false, "target_parameters": null,
            "use_bdlora": null, "arrow_config": null, "kasa_config": null, "ensure_weight_tying": false,
            "a_switch_to_come": false, "a_list_to_come": [], "a_kind_to_come": "none", "a_number_to_come": 0
        }"#;
        let off = serde_json::from_str(off).expect("the text is JSON");
        let config = parse(off).expect("the configuration parses");
        assert!(config.warnings.is_empty(), "{:?}", config.warnings);
        for rank_pattern in [Value::Null, json!({})] {
            assert_eq!(scaling(json!({"rank_pattern": rank_pattern})), (8, 2.0));
        }
    }

    #[test]
    fn parse_of_unknown_numeric_field_warns() {
        let config = parse(json!({"a_size_to_come": 16})).expect("the configuration parses");
        let [warning] = &config.warnings[..] else {
            panic!("{:?}", config.warnings);
        };
        assert!(warning.contains("a_size_to_come is 16"), "{warning}");
    }
}
