//! A session file: a safetensors file with the session's tokens, their keys and values, and data that identify the
//! model. A column of the KV cache is one token position.

use super::{Session, checkpoints::Checkpoints, fingerprint::Fingerprint};
use crate::checkpoint::{Stored, map, write_tensors};
use crate::error::Gemma4Error;
use crate::gemma::Gemma4;
use crate::model::Gemma4Model;
use crate::model::cache::Cache;
use crate::model::cache::checkpoint::Checkpoint;
use crate::model::cache::columns::CacheColumns;
use crate::model::cache::kind::CacheKind;
use crate::model::cache::precision::{CODES, KvPrecision};
use crate::model::cache::slots::Slots;
use crate::model::weights::form_of_weights;
use crate::speculative::drafts::MAX_DRAFT_TOKENS;
use crate::text::chat::Message;
use burn::tensor::{DType, Device, Tensor, TensorData, kind::Basic};
use safetensors::{Dtype, SafeTensors, tensor::Metadata};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{collections::BTreeMap, path::Path};

/// The key of the JSON header in the safetensors file's metadata.
const HEADER: &str = "session";
const VERSION: usize = 1;
const TOKENS: &str = "tokens";
const WEIGHTS: &str = "weights";

/// The header of a session file, which holds all data except the tensors.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    version: usize,
    /// The model's configuration in the format of its `config.json`.
    config: Value,
    compact_keys: bool,
    /// The storage format of the keys and values.
    #[serde(default, skip_serializing_if = "is_of_model")]
    kv: KvPrecision,
    /// The dtype in which keys and values were computed. Older files contain this field only if the keys and values are
    /// int8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    computed_in: Option<String>,
    /// The name of the weights' quantization, for error messages: see [`form_of_weights`]. Older files do not contain
    /// this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weights: Option<String>,
    /// The number of spare slots in each ring buffer of the KV cache. The cache can remove up to this number of tokens
    /// from the end of the text.
    spare: usize,
    /// For sliding layers, the file holds the keys and values of only the session's last `kept` tokens.
    kept: usize,
    /// The last checkpoint of the session, or `None` if the session has no checkpoint.
    turn: Option<Turn>,
    messages: Vec<Message>,
}

/// True if keys and values have the model's dtype. The header then omits the field `kv`, like older files.
fn is_of_model(precision: &KvPrecision) -> bool {
    *precision == KvPrecision::Model
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Turn {
    column: usize,
    kept: usize,
}

/// A session that was read from a file. The session has been checked against a model.
#[derive(Debug)]
pub struct SavedSession {
    cache: Cache,
    read: Vec<u32>,
    checkpoints: Checkpoints,
    /// The conversation that the caller of [`Session::save`] passed.
    pub messages: Vec<Message>,
}

impl SavedSession {
    /// Reads a file that [`Session::save`] wrote. `model` must have the same configuration, weights and compute dtype
    /// as the saved session's model.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Io`] if the file cannot be read. Returns [`Gemma4Error::Malformed`] if the file is
    /// incomplete or not a session file. Returns [`Gemma4Error::Unsupported`] if the session was saved with another
    /// model. This error describes the difference.
    pub fn read(model: &Gemma4Model, path: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        let path = path.as_ref();
        let bytes = map(path)?;
        let file = File::of(path, &bytes)?;
        file.check_model(model)?;
        file.session(model)
    }

    /// The tokens whose keys and values are in the KV cache.
    pub fn tokens(&self) -> &[u32] {
        &self.read
    }

    /// Returns the KV cache of the tokens, for [`Gemma4Model::step`].
    pub fn into_cache(self) -> Cache {
        self.cache
    }
}

impl Gemma4 {
    /// Continues a session that was [read](SavedSession::read) for this model.
    pub fn resume(&self, saved: SavedSession) -> Session<'_> {
        Session {
            gemma: self,
            cache: saved.cache,
            read: saved.read,
            media: Vec::new(),
            checkpoints: saved.checkpoints,
        }
    }
}

impl Session<'_> {
    /// Writes the session's tokens, its keys and values, and a conversation to a file. An existing file is replaced
    /// only when the new file is complete.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Io`] if the file cannot be written. Returns [`Gemma4Error::Device`] if the weights cannot
    /// be read from the device. Passes on the errors of
    /// [`Gemma4Config::to_json`](crate::config::Gemma4Config::to_json). Returns [`Gemma4Error::Argument`] if the session
    /// or a message has images, videos or audio.
    ///
    /// # Panics
    /// Panics if the device fails while the file is written.
    pub fn save(&self, path: impl AsRef<Path>, messages: &[Message]) -> Result<(), Gemma4Error> {
        let mut contents = messages.iter().map(|message| &message.content);
        if !self.media.is_empty() || contents.any(|content| content.has_media()) {
            return Err(Gemma4Error::Argument {
                argument: "session",
                reason: "has images, videos or audio, which a session file cannot hold".into(),
            });
        }
        let model = self.gemma.model();
        let now = self.cache.checkpoint();
        let turn = self.checkpoints.last();
        let header = Header {
            version: VERSION,
            config: config(model)?,
            compact_keys: self.cache.kind().compact_keys,
            kv: self.cache.kind().precision,
            computed_in: Some(model.dtype().name().to_owned()),
            weights: Some(form_of_weights(model)),
            spare: self.cache.spare(),
            kept: now.kept,
            turn: turn.map(|turn| Turn {
                column: turn.column,
                kept: turn.kept,
            }),
            messages: messages.to_vec(),
        };
        let header = serde_json::to_string(&header).map_err(|error| Gemma4Error::Malformed {
            path: path.as_ref().into(),
            reason: error.to_string(),
        })?;
        let numbers = Fingerprint::of(model)?.numbers;
        let of_numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
        let of_tokens = self.read.iter().flat_map(|token| token.to_le_bytes());
        let mut tensors = vec![
            bytes(TOKENS, Dtype::U32, self.read.len(), of_tokens.collect()),
            bytes(WEIGHTS, Dtype::F32, numbers.len(), of_numbers.collect()),
        ];
        let rings = ring_tensors("rings", &now);
        let of_turn = turn.map(|turn| ring_tensors("turn", turn));
        let all = self.cache.columns_of_layers().into_iter();
        let all = all.chain(rings).chain(of_turn.into_iter().flatten());
        tensors.extend(all.flat_map(|(name, slots)| stored(name, slots)));
        write_tensors(path.as_ref(), Some((HEADER, header)), tensors.into_iter())
    }
}

fn bytes(name: &str, dtype: Dtype, count: usize, bytes: Vec<u8>) -> (String, Stored) {
    (name.to_owned(), Stored::of_bytes(vec![count], dtype, bytes))
}

fn ring_tensors(prefix: &str, checkpoint: &Checkpoint) -> Vec<(String, Slots)> {
    let rings = checkpoint.rings.iter().enumerate();
    let tensors = rings.filter_map(|(layer, ring)| Some((layer, ring.as_ref()?)));
    tensors
        .flat_map(|(layer, ring)| {
            [("key", &ring.key), ("value", &ring.value)]
                .map(|(what, tensor)| (format!("{prefix}.{layer}.{what}"), tensor.clone()))
        })
        .collect()
}

/// Returns the tensors that store a KV buffer in a file, with their names. An int8 buffer is stored as packed words and
/// scales, and every other buffer as one tensor.
fn stored(name: String, slots: Slots) -> Vec<(String, Stored)> {
    let numbers = |name, tensor: Tensor<4>| {
        let (shape, dtype) = (tensor.dims().to_vec(), tensor.dtype());
        (name, Stored::new(shape, dtype, move || tensor.clone()))
    };
    match slots {
        Slots::Whole(tensor) => vec![numbers(name, tensor)],
        Slots::Q8 { words, scales } => {
            let shape = words.dims().to_vec();
            let read = move || words.clone().into_data().into_bytes().to_vec();
            vec![
                (words_of(&name), Stored::of_read(shape, Dtype::I32, read)),
                numbers(scales_of(&name), scales),
            ]
        }
    }
}

fn words_of(name: &str) -> String {
    format!("{name}.words")
}

fn scales_of(name: &str) -> String {
    format!("{name}.scales")
}

/// Returns a model's configuration in the format of its `config.json`.
fn config(model: &Gemma4Model) -> Result<Value, Gemma4Error> {
    let json = model.config().to_json()?;
    serde_json::from_str(&json).map_err(|error| Gemma4Error::Config(error.to_string()))
}

/// An opened session file, which has not been compared with a model yet.
struct File<'a> {
    path: &'a Path,
    header: Header,
    tensors: SafeTensors<'a>,
}

impl<'a> File<'a> {
    fn of(path: &'a Path, bytes: &'a [u8]) -> Result<Self, Gemma4Error> {
        let malformed = |reason: String| Gemma4Error::Malformed {
            path: path.into(),
            reason,
        };
        let not_whole = |error| malformed(format!("not a whole safetensors file: {error}"));
        let (_, metadata): (usize, Metadata) =
            SafeTensors::read_metadata(bytes).map_err(not_whole)?;
        let header = metadata.metadata().as_ref().and_then(|all| all.get(HEADER));
        let header = header.ok_or_else(|| malformed("is no session".into()))?;
        let version: Value = serde_json::from_str(header)
            .map_err(|error| malformed(format!("its session's header: {error}")))?;
        if version["version"] != VERSION {
            return Err(malformed(format!(
                "its session has the version {}; this program reads {VERSION}",
                version["version"]
            )));
        }
        let header = serde_json::from_value(version)
            .map_err(|error| malformed(format!("its session's header: {error}")))?;
        let tensors = SafeTensors::deserialize(bytes).map_err(not_whole)?;
        Ok(Self {
            path,
            header,
            tensors,
        })
    }

    fn malformed(&self, reason: impl Into<String>) -> Gemma4Error {
        Gemma4Error::Malformed {
            path: self.path.into(),
            reason: reason.into(),
        }
    }

    fn of_another(&self, what: String) -> Gemma4Error {
        Gemma4Error::Unsupported {
            path: self.path.into(),
            reason: format!("is the session of another model: {what}"),
        }
    }

    /// Returns the dtype in which the session's keys and values were computed, or `None` if the file does not contain
    /// this dtype.
    fn computed_in(&self) -> Option<String> {
        if self.header.computed_in.is_some() || self.header.kv != KvPrecision::Model {
            return self.header.computed_in.clone();
        }
        let mut keys = self.tensors.iter();
        let (_, keys) = keys.find(|(name, _)| ![TOKENS, WEIGHTS].contains(name))?;
        dtype_of(keys.dtype()).map(|dtype| dtype.name().to_owned())
    }

    /// Returns the elements of a one-dimensional tensor. Each element must have 4 bytes.
    fn list(&self, name: &str, dtype: Dtype) -> Result<&[[u8; 4]], Gemma4Error> {
        match self.tensors.tensor(name) {
            Ok(view) if view.dtype() == dtype && view.shape().len() == 1 => {
                Ok(view.data().as_chunks().0)
            }
            _ => Err(self.malformed(format!(
                "has no one-dimensional {dtype:?} tensor called {name}"
            ))),
        }
    }

    /// Checks that the model that saved the session had the same configuration, compute dtype and weights as `model`.
    fn check_model(&self, model: &Gemma4Model) -> Result<(), Gemma4Error> {
        // The configuration in the file was converted to JSON and back, which may change a float. Convert the model's
        // configuration in the same way, so that equal configurations stay equal.
        let own = config(model)?.to_string();
        let own: Value =
            serde_json::from_str(&own).map_err(|error| Gemma4Error::Config(error.to_string()))?;
        if own != self.header.config {
            let of = |config: &Value| config.as_object().cloned().unwrap_or_default();
            let (own, other) = (of(&own), of(&self.header.config));
            let differs = own.keys().chain(other.keys());
            let mut differs = differs.filter(|key| own.get(*key) != other.get(*key));
            let key = differs.next().map_or("config", String::as_str);
            return Err(self.of_another(format!("{key} differs")));
        }
        let computes_in = model.dtype().name();
        if let Some(computed_in) = self.computed_in()
            && computed_in != computes_in
        {
            return Err(self.of_another(format!(
                "its keys were computed in {computed_in}, and the model computes in {computes_in}; expected the same dtype"
            )));
        }
        let form = form_of_weights(model);
        if let Some(weights) = &self.header.weights
            && *weights != form
        {
            return Err(self.of_another(format!(
                "its weights were {weights}, and the model's are {form}; expected weights that are quantized in the same way"
            )));
        }
        let numbers = self.list(WEIGHTS, Dtype::F32)?;
        let numbers: Vec<f32> = numbers
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect();
        match Fingerprint::of(model)?.differs(&numbers) {
            Some(path) => Err(self.of_another(format!("{path} has other weights"))),
            None => Ok(()),
        }
    }

    fn session(&self, model: &Gemma4Model) -> Result<SavedSession, Gemma4Error> {
        let tokens = self.list(TOKENS, Dtype::U32)?;
        let read: Vec<u32> = tokens
            .iter()
            .map(|bytes| u32::from_le_bytes(*bytes))
            .collect();
        let config = model.config();
        let vocabulary = read.iter().map(|token| i64::from(*token));
        config
            .check_tokens(vocabulary)
            .map_err(|error| self.malformed(error.to_string()))?;
        let Header {
            compact_keys,
            kv,
            spare,
            kept,
            turn,
            ..
        } = self.header;
        if read.len() > config.max_position_embeddings || spare > MAX_DRAFT_TOKENS {
            return Err(self.malformed(format!(
                "has {} tokens and {spare} spare slots, more than a session of this model can have",
                read.len()
            )));
        }
        let kind = CacheKind {
            compact_keys,
            precision: kv,
        };
        kind.check(config)
            .map_err(|error| self.malformed(error.to_string()))?;
        let cache = Cache::new(config, vec![0], kind).forgetting(spare);
        let expected = cache.expected_columns(config, read.len());
        let now = Turn {
            column: read.len(),
            kept,
        };
        let mut shapes = expected;
        let ring_shapes = |prefix: &str, turn: Turn| -> Result<Vec<CacheColumns>, Gemma4Error> {
            match turn.column <= read.len() && cache.may_keep(turn.column, turn.kept) {
                true => Ok(cache.expected_rings(config, prefix, turn.kept)),
                false => Err(self.malformed(format!(
                    "keeps {} of {} columns in ring buffers, which a session of this model cannot",
                    turn.kept, turn.column
                ))),
            }
        };
        shapes.extend(ring_shapes("rings", now)?);
        if let Some(turn) = turn {
            shapes.extend(ring_shapes("turn", turn)?);
        }
        let mut tensors = self.upload(shapes, kv, model)?;

        let mut cache = cache;
        cache.fill(model, &mut tensors);
        let mut rings = |prefix: &str, turn: Turn| {
            let rings = cache.rings_of(prefix, &mut tensors);
            Checkpoint {
                column: turn.column,
                kept: turn.kept,
                rings,
            }
        };
        let now = rings("rings", now);
        let turn = turn.map(|turn| rings("turn", turn));
        cache.restore(&now);
        if !cache.is_empty() {
            cache.make_rings(model);
        }
        Ok(SavedSession {
            cache,
            read,
            checkpoints: Checkpoints::of(turn),
            messages: self.header.messages.clone(),
        })
    }

    /// Uploads the tensors that `shapes` lists by name and shape. Apart from these tensors the file may contain only
    /// the tokens and the fingerprint.
    fn upload(
        &self,
        shapes: Vec<CacheColumns>,
        precision: KvPrecision,
        model: &Gemma4Model,
    ) -> Result<BTreeMap<String, Slots>, Gemma4Error> {
        let (device, dtype) = (model.device(), model.dtype());
        let mut views = Vec::with_capacity(shapes.len());
        for CacheColumns { name, shape } in shapes {
            let [batch, heads, columns, width] = shape;
            let parts = match precision {
                KvPrecision::Model => vec![self.view(&name, shape, dtype)?],
                KvPrecision::Q8 => vec![
                    self.view(
                        &words_of(&name),
                        [batch, heads, columns, width / CODES],
                        DType::I32,
                    )?,
                    self.view(&scales_of(&name), [batch, heads, columns, 1], DType::F32)?,
                ],
            };
            views.push((name, parts));
        }
        let parts: usize = views.iter().map(|(_, parts)| parts.len()).sum();
        if self.tensors.len() != parts + 2 {
            return Err(self.malformed("has tensors that do not belong to a session of this model"));
        }
        let uploaded = views.into_iter().map(|(name, parts)| {
            let mut parts = parts.into_iter();
            let mut next = || {
                parts
                    .next()
                    .expect("each buffer has one view per tensor of its precision")
            };
            let slots = match precision {
                KvPrecision::Model => Slots::Whole(next().upload(&device)),
                KvPrecision::Q8 => Slots::Q8 {
                    words: next().upload(&device),
                    scales: next().upload(&device),
                },
            };
            (name, slots)
        });
        Ok(uploaded.collect())
    }

    /// Checks the shape and dtype of a tensor in the file, and returns the tensor.
    fn view(
        &self,
        name: &str,
        shape: [usize; 4],
        dtype: DType,
    ) -> Result<Numbers<'a>, Gemma4Error> {
        let view = self.tensors.tensor(name);
        let view = view.map_err(|_| self.malformed(format!("{name} is missing")))?;
        if view.shape() != shape {
            let found = view.shape();
            return Err(self.malformed(format!(
                "{name} has the shape {found:?}; it should be {shape:?}"
            )));
        }
        if dtype_of(view.dtype()) != Some(dtype) {
            let (found, expected) = (view.dtype(), dtype.name());
            return Err(match self.header.kv {
                KvPrecision::Model => self.of_another(format!(
                    "its keys are in {found:?}, and the model computes in {expected}"
                )),
                KvPrecision::Q8 => self.malformed(format!(
                    "{name} is in {found:?}; in int8 it should be in {expected}"
                )),
            });
        }
        let bytes = view.data();
        Ok(Numbers {
            bytes,
            shape,
            dtype,
        })
    }
}

/// The elements of a tensor in the mapped file.
struct Numbers<'a> {
    bytes: &'a [u8],
    shape: [usize; 4],
    dtype: DType,
}

impl Numbers<'_> {
    fn upload<K: Basic>(&self, device: &Device) -> Tensor<4, K> {
        let data = TensorData::from_bytes_vec(self.bytes.to_vec(), self.shape, self.dtype);
        Tensor::from_data(data, (device, self.dtype))
    }
}

fn dtype_of(written: Dtype) -> Option<DType> {
    match written {
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        Dtype::I32 => Some(DType::I32),
        _ => None,
    }
}
