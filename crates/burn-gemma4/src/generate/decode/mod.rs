//! A token at a time: what a model computes while it generates.

#[cfg(feature = "cube")]
mod graph;
#[cfg(feature = "cube")]
mod position;

use crate::{
    Cache, Gemma4Error, Gemma4Model,
    model::{Logits, observe::Part},
    op::argmax::argmax,
};
use burn::tensor::{DType, Int, Tensor, TensorData};
#[cfg(feature = "cube")]
use graph::GraphCapture;
use std::marker::PhantomData;

/// Goes on from a filled [`Cache`], a token of every sequence at a time.
///
/// On CubeCL devices it runs kernels of its own, bound by the memory's rate, for up to 8 sequences, and where the device
/// can, it captures their launches in a graph once and replays it. That holds for dense models whose parameters all have one of the
/// dtypes f32, f16 and bf16, and for sequences without padding; all else goes through [`Gemma4Model::step`], which computes
/// the same.
///
/// A capture takes milliseconds, at the third or fourth token and whenever the cache has grown. On CUDA it concerns the
/// whole process: another thread's call that waits for the device or allocates on it ends in an error meanwhile (CubeCL
/// 0.11 captures in CUDA's global mode). A program whose threads share a CUDA device goes
/// [`without_graph_capture`](Self::without_graph_capture), which is about a third as fast.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_gemma4::{Gemma4Config, Gemma4Model, LayerType, Logits};
///
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// let config = Gemma4Config {
///     vocab_size: 100,
///     hidden_size: 32,
///     intermediate_size: 64,
///     layer_types: vec![LayerType::Sliding, LayerType::Full],
///     num_attention_heads: 2,
///     sliding_head_dim: 16,
///     global_head_dim: 32,
///     num_kv_shared_layers: 0,
///     hidden_size_per_layer_input: 0,
///     ..Gemma4Config::e2b()
/// };
/// let device = Device::flex();
/// let model = Gemma4Model::new(&config, &device);
/// let mut cache = model.cache(vec![0]);
/// let prompt = Tensor::<2, Int>::from_data([[2, 17, 5]], &device);
/// model.step(prompt, &mut cache, Logits::None)?;
/// let mut decoder = model.decoder(&mut cache);
/// let mut token = 44;
/// for _ in 0..3 {
///     token = decoder.step(&[token])?.argmax()?[0];
/// }
/// assert_eq!(cache.len(), 6);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Decoder<'a> {
    model: &'a Gemma4Model,
    cache: &'a mut Cache,
    #[cfg(feature = "cube")]
    graph: Option<GraphCapture>,
    /// A replay is ordered after what the capturing thread has put on the device, and after nothing else.
    _of_one_thread: PhantomData<*const ()>,
}

/// What comes after a token: the next one's logits, on the device until they are asked for.
#[derive(Debug)]
pub struct Next<'a> {
    /// `[batch, vocabulary]`.
    logits: Tensor<2>,
    /// `[batch]`.
    argmax: Option<Tensor<1, Int>>,
    /// The next step may write over them.
    _until_the_next: PhantomData<&'a mut ()>,
}

impl Gemma4Model {
    /// Goes on from a filled cache, a token of every sequence at a time.
    pub fn decoder<'a>(&'a self, cache: &'a mut Cache) -> Decoder<'a> {
        Decoder::new(self, cache)
    }
}

impl<'a> Decoder<'a> {
    fn new(model: &'a Gemma4Model, cache: &'a mut Cache) -> Self {
        Self {
            #[cfg(feature = "cube")]
            graph: GraphCapture::new(model, cache),
            model,
            cache,
            _of_one_thread: PhantomData,
        }
    }

    /// Reads one more token of each sequence.
    ///
    /// # Errors
    /// Where there is not one token for each of the cache's sequences, and where one is outside the vocabulary.
    pub fn step(&mut self, tokens: &[u32]) -> Result<Next<'_>, Gemma4Error> {
        self.check(tokens)?;
        #[cfg(feature = "cube")]
        if let Some(graph) = &mut self.graph
            && !self.cache.is_empty()
        {
            let (logits, argmax) = graph.step(self.model, self.cache, tokens);
            return Ok(Next::new(logits, Some(argmax)));
        }
        self.plain_step(tokens)
    }

    /// As [`step`](Self::step), with a call after each part of the computation has been put on the device, in its order.
    /// Without kernels of its own there are no calls.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn step_by_parts(
        &mut self,
        tokens: &[u32],
        after: &mut dyn FnMut(Part),
    ) -> Result<Next<'_>, Gemma4Error> {
        self.check(tokens)?;
        #[cfg(feature = "cube")]
        if let Some(graph) = &mut self.graph
            && !self.cache.is_empty()
        {
            let (logits, argmax) = graph.step_by_parts(self.model, self.cache, tokens, after);
            return Ok(Next::new(logits, Some(argmax)));
        }
        let _ = after;
        self.plain_step(tokens)
    }

    /// How tokens are computed at present.
    pub fn mode(&self) -> DecodeMode {
        #[cfg(feature = "cube")]
        if let Some(graph) = &self.graph {
            return graph.mode();
        }
        DecodeMode::Layers
    }

    /// Puts every token's launches on the device one by one, rather than replay a graph of them.
    pub fn without_graph_capture(self) -> Self {
        Self {
            #[cfg(feature = "cube")]
            graph: self.graph.map(GraphCapture::without_graph_capture),
            ..self
        }
    }

    fn check(&self, tokens: &[u32]) -> Result<(), Gemma4Error> {
        let batch = self.cache.batch();
        if tokens.len() != batch {
            return Err(Gemma4Error::Argument {
                argument: "tokens",
                reason: format!("are {}, but the cache has {batch} sequences", tokens.len()),
            });
        }
        let tokens = tokens.iter().map(|token| i64::from(*token));
        self.model.config().check_tokens(tokens)
    }

    fn plain_step(&mut self, tokens: &[u32]) -> Result<Next<'_>, Gemma4Error> {
        let device = self.model.device();
        let data = TensorData::new(integers(tokens), [tokens.len(), 1]);
        let tokens = Tensor::<2, Int>::from_data(data, &device);
        let logits = self
            .model
            .step_within(tokens, self.cache, Logits::Last(1))?;
        Ok(Next::of(logits.expect("one position is asked for")))
    }
}

/// How a [`Decoder`] computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeMode {
    /// Through [`Gemma4Model::step`].
    Layers,
    /// By kernels of its own.
    Kernels,
    /// By the same kernels, captured in a graph, of which one launch replays them all.
    Graph,
}

impl Next<'_> {
    fn new(logits: Tensor<2>, argmax: Option<Tensor<1, Int>>) -> Self {
        Self {
            logits,
            argmax,
            _until_the_next: PhantomData,
        }
    }

    /// What logits of one position say, `[batch, 1, vocabulary]`, such as those of a prompt's last one.
    pub fn of(logits: Tensor<3>) -> Self {
        Self::new(logits.squeeze_dim(1), None)
    }

    /// The likeliest token of each sequence. A logit that is NaN counts as −∞. Only the tokens' numbers leave the device.
    ///
    /// # Errors
    /// [`Gemma4Error::Argument`] where every logit of a sequence is NaN or −∞, so that none is the likeliest;
    /// [`Gemma4Error::Device`] where the device failed.
    pub fn argmax(self) -> Result<Vec<u32>, Gemma4Error> {
        let [_, vocabulary] = self.logits.dims();
        let tokens = match self.argmax {
            Some(tokens) => tokens,
            None => argmax(self.logits),
        };
        let tokens = tokens.try_into_data().map_err(failed)?;
        tokens
            .iter::<i64>()
            .map(|token| u32::try_from(token).map_err(|_| Gemma4Error::no_number(vocabulary)))
            .collect()
    }

    /// The logits, `[batch · vocabulary]`, on the host.
    ///
    /// # Errors
    /// [`Gemma4Error::Device`] where the device failed.
    pub fn logits(self) -> Result<Vec<f32>, Gemma4Error> {
        let logits = self
            .logits
            .cast(DType::F32)
            .try_into_data()
            .map_err(failed)?;
        Ok(logits.iter::<f32>().collect())
    }
}

fn failed(error: impl std::fmt::Display) -> Gemma4Error {
    Gemma4Error::Device(format!("it computed no logits: {error}"))
}

fn integers(tokens: &[u32]) -> Vec<i32> {
    tokens.iter().map(|token| *token as i32).collect()
}
