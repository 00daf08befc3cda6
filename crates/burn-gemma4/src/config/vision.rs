//! The configuration of a multimodal model's vision: `vision_config` in `config.json`.

use super::Gemma4Config;
use super::multimodal::{UNIFIED, check_layers, check_sizes, check_tokens, epsilon, refuse};
use super::validate::LARGEST_TENSOR;
use crate::error::Gemma4Error;
use crate::json;
use serde::Deserialize;
use serde_json::Value;

/// The name of the configuration in `config.json`.
const FIELD: &str = "vision_config";

/// How a model sees images.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct VisionConfig {
    /// The part of the model that computes soft tokens from pixels.
    pub encoder: EncoderConfig,
    /// The width and height of a patch in pixels.
    pub patch_size: usize,
    /// The width and height, in patches, of the square that becomes one soft token.
    pub pooling_kernel_size: usize,
    /// The token in whose place each soft token stands.
    pub image_token: u32,
    /// The token in whose place each soft token of a video's frame stands.
    pub video_token: u32,
    /// The token before the soft tokens of an image.
    pub begin_token: u32,
    /// The token after the soft tokens of an image.
    pub end_token: u32,
    /// True if the soft tokens of an image see each other in both directions in sliding layers.
    pub is_bidirectional: bool,
}

/// The part of the model that computes soft tokens from pixels.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum EncoderConfig {
    /// A vision tower: a transformer over the patches of an image.
    Tower(TowerConfig),
    /// A projection of each square of patches, without a transformer.
    Projection(ProjectionConfig),
}

/// The sizes of a vision tower.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TowerConfig {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub rms_norm_eps: f64,
    /// The base of the rotation frequencies.
    pub rope_theta: f64,
    /// The largest number of patches in a row or a column.
    pub position_embedding_size: usize,
    /// True if the inputs and outputs of linear layers are clipped to bounds in the checkpoint.
    pub use_clipped_linears: bool,
    /// True if the soft tokens are standardized by a bias and a scale.
    pub standardize: bool,
}

/// The sizes of the projection in a model without a vision tower.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ProjectionConfig {
    pub mm_embed_dim: usize,
    /// The largest number of soft tokens in a row or a column.
    pub mm_posemb_size: usize,
    pub rms_norm_eps: f64,
}

/// The fields of a `config.json` that concern images.
#[derive(Deserialize)]
struct File {
    model_type: Option<String>,
    vision_config: Option<Value>,
    text_config: Option<Value>,
    image_token_id: Option<u32>,
    video_token_id: Option<u32>,
    boi_token_id: Option<u32>,
    eoi_token_id: Option<u32>,
}

/// The fields of `vision_config`, of both kinds of models.
#[derive(Deserialize)]
struct Fields {
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_activation: Option<String>,
    rms_norm_eps: Option<f64>,
    attention_bias: Option<bool>,
    rope_parameters: Option<Rope>,
    pooling_kernel_size: Option<usize>,
    patch_size: Option<usize>,
    position_embedding_size: Option<usize>,
    use_clipped_linears: Option<bool>,
    standardize: Option<bool>,
    mm_embed_dim: Option<usize>,
    mm_posemb_size: Option<usize>,
    output_proj_dims: Option<usize>,
    model_patch_size: Option<usize>,
}

#[derive(Deserialize)]
struct Rope {
    rope_type: Option<String>,
    rope_theta: Option<f64>,
}

impl VisionConfig {
    /// Reads the vision's configuration from the text of a `config.json`. `text` is the configuration of the text model.
    /// A missing field has the default value of Hugging Face Transformers. Returns `None` if the model has no vision.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Config`], which names the field whose value is impossible or not supported.
    pub fn from_json(json: &str, text: &Gemma4Config) -> Result<Option<Self>, Gemma4Error> {
        let file: File = json::from_slice(json.as_bytes()).map_err(Gemma4Error::Config)?;
        let Some(vision) = file.vision_config.as_ref().filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let fields: Fields = json::from_field(FIELD, vision).map_err(Gemma4Error::Config)?;
        let is_unified = file.model_type.as_deref() == Some(UNIFIED);
        let config = Self {
            patch_size: fields.patch_size.unwrap_or(16),
            pooling_kernel_size: fields.pooling_kernel_size.unwrap_or(3),
            image_token: file.image_token_id.unwrap_or(258_880),
            video_token: file.video_token_id.unwrap_or(258_884),
            begin_token: file.boi_token_id.unwrap_or(255_999),
            end_token: file.eoi_token_id.unwrap_or(258_882),
            is_bidirectional: is_bidirectional(&file, is_unified),
            encoder: match is_unified {
                true => EncoderConfig::Projection(fields.projection()?),
                false => EncoderConfig::Tower(fields.tower()?),
            },
        };
        config.validate(&fields, text)?;
        Ok(Some(config))
    }

    fn validate(&self, fields: &Fields, text: &Gemma4Config) -> Result<(), Gemma4Error> {
        let tokens = [
            ("image_token_id", self.image_token),
            ("boi_token_id", self.begin_token),
            ("eoi_token_id", self.end_token),
        ];
        check_tokens(&tokens, text)?;
        let (patch, pooling) = (self.patch_size, self.pooling_kernel_size);
        check_sizes(
            FIELD,
            &[("patch_size", patch), ("pooling_kernel_size", pooling)],
        )?;
        if patch * pooling > 1024 {
            return refuse(format!(
                "vision_config: patch_size {patch} and pooling_kernel_size {pooling} give squares of more than 1024 pixels"
            ));
        }
        match fields.model_patch_size {
            Some(size) if size != patch * pooling => refuse(format!(
                "vision_config.model_patch_size is {size}; expected patch_size · pooling_kernel_size, {}",
                patch * pooling
            )),
            _ => Ok(()),
        }
    }
}

/// True if the soft tokens of an image see each other in both directions.
fn is_bidirectional(file: &File, is_unified: bool) -> bool {
    let text = file.text_config.as_ref();
    match text.and_then(|text| text.get("use_bidirectional_attention")) {
        Some(value) => value == "vision",
        // The default of Transformers' configuration class for unified models is "vision", and for others null.
        None => is_unified,
    }
}

impl Fields {
    fn tower(&self) -> Result<TowerConfig, Gemma4Error> {
        match self.hidden_activation.as_deref() {
            None | Some("gelu_pytorch_tanh") => {}
            Some(other) => {
                return refuse(format!(
                    "vision_config.hidden_activation is {other:?}; only gelu_pytorch_tanh is supported"
                ));
            }
        }
        if self.attention_bias == Some(true) {
            return refuse("vision_config.attention_bias is true; only false is supported".into());
        }
        let rope = self.rope_parameters.as_ref();
        match rope.and_then(|rope| rope.rope_type.as_deref()) {
            // Older files say "default". The tower's rotation is axial in both cases.
            None | Some("axial" | "default") => {}
            Some(other) => {
                return refuse(format!(
                    "vision_config.rope_parameters.rope_type is {other:?}; expected \"axial\" or \"default\""
                ));
            }
        }
        let rope_theta = rope.and_then(|rope| rope.rope_theta).unwrap_or(100.0);
        if !(1.0..=1e9).contains(&rope_theta) {
            return refuse(format!(
                "vision_config.rope_parameters.rope_theta is {rope_theta}, which is not a number from 1 to 1e9"
            ));
        }
        let heads = self.num_attention_heads.unwrap_or(12);
        let tower = TowerConfig {
            hidden_size: self.hidden_size.unwrap_or(768),
            intermediate_size: self.intermediate_size.unwrap_or(3072),
            num_hidden_layers: self.num_hidden_layers.unwrap_or(16),
            num_attention_heads: heads,
            num_key_value_heads: self.num_key_value_heads.unwrap_or(12),
            head_dim: self.head_dim.unwrap_or(64),
            rms_norm_eps: epsilon(FIELD, self.rms_norm_eps)?,
            rope_theta,
            position_embedding_size: self.position_embedding_size.unwrap_or(10 * 1024),
            use_clipped_linears: self.use_clipped_linears.unwrap_or(false),
            standardize: self.standardize.unwrap_or(false),
        };
        tower.validate()?;
        Ok(tower)
    }

    fn projection(&self) -> Result<ProjectionConfig, Gemma4Error> {
        let projection = ProjectionConfig {
            mm_embed_dim: self.mm_embed_dim.unwrap_or(3840),
            mm_posemb_size: self.mm_posemb_size.unwrap_or(1120),
            rms_norm_eps: epsilon(FIELD, self.rms_norm_eps)?,
        };
        let columns = projection.mm_embed_dim;
        check_sizes(
            FIELD,
            &[
                ("mm_embed_dim", columns),
                ("mm_posemb_size", projection.mm_posemb_size),
            ],
        )?;
        match self.output_proj_dims {
            Some(dims) if dims != columns => refuse(format!(
                "vision_config.output_proj_dims is {dims}; expected mm_embed_dim, {columns}"
            )),
            _ => Ok(projection),
        }
    }
}

impl TowerConfig {
    fn validate(&self) -> Result<(), Gemma4Error> {
        let (heads, head_dim) = (self.num_attention_heads, self.head_dim);
        check_sizes(
            FIELD,
            &[
                ("hidden_size", self.hidden_size),
                ("intermediate_size", self.intermediate_size),
                ("num_attention_heads", heads),
                ("num_key_value_heads", self.num_key_value_heads),
                ("head_dim", head_dim),
                ("position_embedding_size", self.position_embedding_size),
            ],
        )?;
        check_layers(FIELD, self.num_hidden_layers)?;
        if !head_dim.is_multiple_of(4) || head_dim > attention_cube::MAX_HEAD_DIM {
            return refuse(format!(
                "vision_config.head_dim is {head_dim}, which is not a multiple of 4 up to {}",
                attention_cube::MAX_HEAD_DIM
            ));
        }
        if !heads.is_multiple_of(self.num_key_value_heads) {
            return refuse(format!(
                "vision_config.num_attention_heads is {heads}, which is not a multiple of num_key_value_heads {}",
                self.num_key_value_heads
            ));
        }
        let widest = self
            .intermediate_size
            .max(heads * head_dim)
            .max(self.position_embedding_size * 2);
        match widest * self.hidden_size > LARGEST_TENSOR {
            true => refuse("vision_config: a tensor exceeds the maximum number of elements".into()),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(vision: Value) -> Result<Option<VisionConfig>, Gemma4Error> {
        let json = json!({"model_type": "gemma4", "vision_config": vision}).to_string();
        VisionConfig::from_json(&json, &Gemma4Config::e2b())
    }

    #[test]
    fn from_json_with_empty_vision_config_has_defaults_of_e2b() {
        let config = read(json!({})).expect("the defaults are valid");
        let config = config.expect("the model has vision");
        let EncoderConfig::Tower(tower) = &config.encoder else {
            panic!("gemma4 has a tower");
        };
        assert_eq!(
            (tower.hidden_size, tower.head_dim, tower.num_hidden_layers),
            (768, 64, 16)
        );
        assert!(!config.is_bidirectional);
        assert_eq!(read(Value::Null).expect("the model has no vision"), None);
    }

    #[test]
    fn from_json_of_unified_model_is_bidirectional_unless_null() {
        for (value, expected) in [
            (None, true),
            (Some(Value::Null), false),
            (Some("vision".into()), true),
        ] {
            let mut text = serde_json::Map::new();
            text.extend(value.map(|value| ("use_bidirectional_attention".to_owned(), value)));
            let json = json!({"model_type": UNIFIED, "text_config": text, "vision_config": {}});
            let config = VisionConfig::from_json(&json.to_string(), &Gemma4Config::e2b());
            let config = config
                .expect("the configuration is valid")
                .expect("the model has vision");
            assert_eq!(config.is_bidirectional, expected, "{json}");
            assert!(matches!(config.encoder, EncoderConfig::Projection(_)));
        }
    }

    #[test]
    fn from_json_with_wrong_field_names_it() {
        for (vision, word) in [
            (json!({"hidden_activation": "silu"}), "hidden_activation"),
            (json!({"attention_bias": true}), "attention_bias"),
            (
                json!({"rope_parameters": {"rope_type": "yarn"}}),
                "rope_type",
            ),
            (
                json!({"rope_parameters": {"rope_theta": -1.0}}),
                "rope_theta",
            ),
            (json!({"head_dim": 70}), "head_dim"),
            (json!({"hidden_size": 0}), "hidden_size"),
            (json!({"hidden_size": "many"}), "hidden_size"),
            (json!({"num_hidden_layers": 1_000_000}), "num_hidden_layers"),
            (json!({"num_key_value_heads": 5}), "num_key_value_heads"),
            (json!({"patch_size": 0}), "patch_size"),
            (json!({"patch_size": 1000}), "pooling_kernel_size"),
            (json!({"rms_norm_eps": 0.0}), "rms_norm_eps"),
            (json!({"model_patch_size": 47}), "model_patch_size"),
        ] {
            let error = read(vision.clone())
                .expect_err("the value is refused")
                .to_string();
            assert!(error.contains(word), "{vision}: {error}");
        }
    }
}
