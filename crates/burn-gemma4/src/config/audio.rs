//! The configuration of a multimodal model's audio: `audio_config` in `config.json`.

use super::Gemma4Config;
use super::multimodal::{UNIFIED, check_layers, check_sizes, check_tokens, epsilon, refuse};
use super::validate::LARGEST_TENSOR;
use crate::error::Gemma4Error;
use crate::json;
use serde::Deserialize;
use serde_json::Value;

/// The name of the configuration in `config.json`.
const FIELD: &str = "audio_config";

/// The largest kernel of the light convolution. Published models have 5.
const LONGEST_KERNEL: usize = 256;

/// The largest value of hidden keys in the attention of a tower. Above this value, a hidden key would get a weight.
const HIDDEN_LOGIT: f64 = -1e4;

/// How a model hears audio.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AudioConfig {
    /// The part of the model that computes soft tokens from features.
    pub encoder: AudioEncoderConfig,
    /// The token in whose place each soft token stands.
    pub audio_token: u32,
    /// The token before the soft tokens of an audio clip.
    pub begin_token: u32,
    /// The token after the soft tokens of an audio clip.
    pub end_token: u32,
}

/// The part of the model that computes soft tokens from features.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AudioEncoderConfig {
    /// An audio tower: a conformer over log-mel features.
    Tower(ConformerConfig),
    /// A projection of each frame of samples, without a tower.
    Projection(FrameConfig),
}

/// The sizes of an audio tower.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ConformerConfig {
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    /// The output channels of the two subsampling convolutions.
    pub channels: [usize; 2],
    /// The kernel of the light convolution, in rows.
    pub conv_kernel_size: usize,
    /// The factor of the feed-forward outputs before they are added to the residual stream.
    pub residual_weight: f64,
    /// The number of keys that a row sees: its own key and those before it. Attention also runs in blocks of this size.
    pub window: usize,
    /// The softcap of the attention scores.
    pub logit_cap: f64,
    /// True if the inputs and outputs of linear layers are clipped to bounds in the checkpoint.
    pub use_clipped_linears: bool,
    /// The epsilon of the norms of convolutions and of the projection to the text model.
    pub rms_norm_eps: f64,
    /// The largest magnitude of the rows between the parts of a layer.
    pub gradient_clipping: f64,
    pub output_proj_dims: usize,
}

/// The sizes of the projection in a model without an audio tower.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FrameConfig {
    /// The number of samples of one soft token.
    pub audio_embed_dim: usize,
    pub rms_norm_eps: f64,
}

/// The fields of a `config.json` that concern audio.
#[derive(Deserialize)]
struct File {
    model_type: Option<String>,
    audio_config: Option<Value>,
    audio_token_id: Option<u32>,
    boa_token_id: Option<u32>,
    // Files have one name or the other. Hugging Face Transformers reads the first one.
    eoa_token_index: Option<u32>,
    eoa_token_id: Option<u32>,
}

/// The fields of `audio_config`, of both kinds of models.
#[derive(Deserialize)]
struct Fields {
    hidden_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    hidden_act: Option<String>,
    subsampling_conv_channels: Option<[usize; 2]>,
    conv_kernel_size: Option<usize>,
    residual_weight: Option<f64>,
    attention_chunk_size: Option<usize>,
    attention_context_left: Option<usize>,
    attention_context_right: Option<usize>,
    attention_logit_cap: Option<f64>,
    attention_invalid_logits_value: Option<f64>,
    use_clipped_linears: Option<bool>,
    rms_norm_eps: Option<f64>,
    gradient_clipping: Option<f64>,
    output_proj_dims: Option<usize>,
    audio_embed_dim: Option<usize>,
}

impl AudioConfig {
    /// Reads the audio's configuration from the text of a `config.json`. `text` is the configuration of the text model.
    /// A missing field has the default value of Hugging Face Transformers. Returns `None` if the model hears no audio.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Config`], which names the field whose value is impossible or not supported.
    pub fn from_json(json: &str, text: &Gemma4Config) -> Result<Option<Self>, Gemma4Error> {
        let file: File = json::from_slice(json.as_bytes()).map_err(Gemma4Error::Config)?;
        let Some(audio) = file.audio_config.as_ref().filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let fields: Fields = json::from_field(FIELD, audio).map_err(Gemma4Error::Config)?;
        let end_token = file.eoa_token_index.or(file.eoa_token_id);
        let config = Self {
            audio_token: file.audio_token_id.unwrap_or(258_881),
            begin_token: file.boa_token_id.unwrap_or(256_000),
            end_token: end_token.unwrap_or(258_883),
            encoder: match file.model_type.as_deref() == Some(UNIFIED) {
                true => AudioEncoderConfig::Projection(fields.projection()?),
                false => AudioEncoderConfig::Tower(fields.tower()?),
            },
        };
        let tokens = [
            ("audio_token_id", config.audio_token),
            ("boa_token_id", config.begin_token),
            ("eoa_token_index", config.end_token),
        ];
        check_tokens(&tokens, text)?;
        Ok(Some(config))
    }
}

impl Fields {
    fn tower(&self) -> Result<ConformerConfig, Gemma4Error> {
        match self.hidden_act.as_deref() {
            None | Some("silu") => {}
            Some(other) => {
                return refuse(format!(
                    "{FIELD}.hidden_act is {other:?}; only silu is supported"
                ));
            }
        }
        let tower = ConformerConfig {
            hidden_size: self.hidden_size.unwrap_or(1024),
            num_hidden_layers: self.num_hidden_layers.unwrap_or(12),
            num_attention_heads: self.num_attention_heads.unwrap_or(8),
            channels: self.subsampling_conv_channels.unwrap_or([128, 32]),
            conv_kernel_size: self.conv_kernel_size.unwrap_or(5),
            residual_weight: self.residual_weight.unwrap_or(0.5),
            window: self.window()?,
            logit_cap: self.attention_logit_cap.unwrap_or(50.0),
            use_clipped_linears: self.use_clipped_linears.unwrap_or(true),
            rms_norm_eps: epsilon(FIELD, self.rms_norm_eps)?,
            gradient_clipping: self.gradient_clipping.unwrap_or(1e10),
            output_proj_dims: self.output_proj_dims.unwrap_or(1536),
        };
        let hidden_logit = self.attention_invalid_logits_value.unwrap_or(-1e9);
        if hidden_logit.is_nan() || hidden_logit > HIDDEN_LOGIT {
            return refuse(format!(
                "{FIELD}.attention_invalid_logits_value is {hidden_logit}; expected at most {HIDDEN_LOGIT}"
            ));
        }
        tower.validate()?;
        Ok(tower)
    }

    /// Returns the number of keys that a row sees. Hugging Face Transformers numbers the relative positions of a block
    /// from half of its context. These numbers are distances only in the accepted configurations.
    fn window(&self) -> Result<usize, Gemma4Error> {
        let chunk = self.attention_chunk_size.unwrap_or(12);
        let left = self.attention_context_left.unwrap_or(13);
        let right = self.attention_context_right.unwrap_or(0);
        if right != 0 {
            return refuse(format!(
                "{FIELD}.attention_context_right is {right}; only 0 is supported"
            ));
        }
        if left != chunk + 1 {
            return refuse(format!(
                "{FIELD}.attention_context_left is {left}; expected attention_chunk_size + 1, {}",
                chunk + 1
            ));
        }
        Ok(chunk)
    }

    fn projection(&self) -> Result<FrameConfig, Gemma4Error> {
        let projection = FrameConfig {
            audio_embed_dim: self.audio_embed_dim.unwrap_or(640),
            rms_norm_eps: epsilon(FIELD, self.rms_norm_eps)?,
        };
        check_sizes(FIELD, &[("audio_embed_dim", projection.audio_embed_dim)])?;
        Ok(projection)
    }
}

impl ConformerConfig {
    fn validate(&self) -> Result<(), Gemma4Error> {
        let [first, second] = self.channels;
        let (hidden, heads) = (self.hidden_size, self.num_attention_heads);
        check_sizes(
            FIELD,
            &[
                ("hidden_size", hidden),
                ("num_attention_heads", heads),
                ("subsampling_conv_channels[0]", first),
                ("subsampling_conv_channels[1]", second),
                ("attention_chunk_size", self.window),
                ("output_proj_dims", self.output_proj_dims),
            ],
        )?;
        check_layers(FIELD, self.num_hidden_layers)?;
        if !hidden.is_multiple_of(heads) || !hidden.is_multiple_of(2) {
            return refuse(format!(
                "{FIELD}.hidden_size is {hidden}, which is not a multiple of 2 and of num_attention_heads {heads}"
            ));
        }
        if !first.is_multiple_of(4) {
            return refuse(format!(
                "{FIELD}.subsampling_conv_channels[0] is {first}, which is not a multiple of 4"
            ));
        }
        if !(1..=LONGEST_KERNEL).contains(&self.conv_kernel_size) {
            return refuse(format!(
                "{FIELD}.conv_kernel_size is {}, which is not a number from 1 to {LONGEST_KERNEL}",
                self.conv_kernel_size
            ));
        }
        for (name, value) in [
            ("residual_weight", self.residual_weight),
            ("attention_logit_cap", self.logit_cap),
            ("gradient_clipping", self.gradient_clipping),
        ] {
            if !(value as f32).is_normal() || value <= 0.0 {
                return refuse(format!(
                    "{FIELD}.{name} is {value}, which is not a positive number in f32"
                ));
            }
        }
        let widest = (4 * hidden)
            .max(first / 4 * second)
            .max(self.output_proj_dims);
        match widest * hidden > LARGEST_TENSOR || first * second * 9 > LARGEST_TENSOR {
            true => refuse(format!(
                "{FIELD}: a tensor exceeds the maximum number of elements"
            )),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(audio: Value) -> Result<Option<AudioConfig>, Gemma4Error> {
        let json = json!({"model_type": "gemma4", "audio_config": audio}).to_string();
        AudioConfig::from_json(&json, &Gemma4Config::e2b())
    }

    #[test]
    fn from_json_with_empty_audio_config_has_defaults_of_e2b() {
        let config = read(json!({})).expect("the defaults are valid");
        let config = config.expect("the model hears audio");
        let AudioEncoderConfig::Tower(tower) = &config.encoder else {
            panic!("gemma4 has a tower");
        };
        assert_eq!(
            (tower.hidden_size, tower.num_attention_heads, tower.window),
            (1024, 8, 12)
        );
        assert_eq!(config.end_token, 258_883);
        assert_eq!(read(Value::Null).expect("the model hears nothing"), None);
    }

    #[test]
    fn from_json_of_unified_model_has_frames() {
        let json = json!({"model_type": UNIFIED, "audio_config": {}, "eoa_token_id": 7});
        let config = AudioConfig::from_json(&json.to_string(), &Gemma4Config::e2b());
        let config = config
            .expect("the configuration is valid")
            .expect("the model hears audio");
        let AudioEncoderConfig::Projection(frames) = &config.encoder else {
            panic!("a unified model has no tower");
        };
        assert_eq!((frames.audio_embed_dim, config.end_token), (640, 7));
    }

    #[test]
    fn from_json_with_wrong_field_names_it() {
        for (audio, word) in [
            (json!({"hidden_act": "gelu"}), "hidden_act"),
            (json!({"hidden_size": 0}), "hidden_size"),
            (json!({"hidden_size": 1001}), "hidden_size"),
            (json!({"hidden_size": "many"}), "hidden_size"),
            (json!({"num_hidden_layers": 1_000_000}), "num_hidden_layers"),
            (
                json!({"subsampling_conv_channels": [6, 4]}),
                "subsampling_conv_channels[0]",
            ),
            (
                json!({"subsampling_conv_channels": [8]}),
                "subsampling_conv_channels",
            ),
            (json!({"conv_kernel_size": 0}), "conv_kernel_size"),
            (
                json!({"attention_context_right": 2}),
                "attention_context_right",
            ),
            (
                json!({"attention_chunk_size": 20}),
                "attention_context_left",
            ),
            (json!({"attention_logit_cap": 0.0}), "attention_logit_cap"),
            (
                json!({"attention_invalid_logits_value": -1.0}),
                "attention_invalid_logits_value",
            ),
            (json!({"gradient_clipping": -1.0}), "gradient_clipping"),
            (json!({"rms_norm_eps": 0.0}), "rms_norm_eps"),
        ] {
            let error = read(audio.clone())
                .expect_err("the value is refused")
                .to_string();
            assert!(error.contains(word), "{audio}: {error}");
        }
    }
}
