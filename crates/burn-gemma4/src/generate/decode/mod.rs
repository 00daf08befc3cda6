//! A token at a time: what a model computes while it generates.

#[cfg(feature = "cube")]
mod ahead;
#[cfg(feature = "cube")]
mod graph;
mod guessed;
#[cfg(feature = "cube")]
mod inputs;
mod next;
#[cfg(feature = "cube")]
mod position;
#[cfg(feature = "cube")]
mod round;

use crate::{
    Cache, Drafter, Gemma4Error, Gemma4Model, Guesses, Sampler,
    model::{Logits, observe::Part, per_layer::Tokens},
};
#[cfg(feature = "cube")]
use crate::{
    generate::sampling::device::DeviceSampler, model::few_rows::FewRows,
    op::linear::few_rows::MOST_ROWS,
};
use burn::tensor::Tensor;
#[cfg(feature = "cube")]
use graph::GraphCapture;
pub use guessed::GuessedTokens;
pub(crate) use guessed::Streams;
pub use next::Next;
use std::marker::PhantomData;

/// Runs before launches are captured: capturing runs them a few times, which a short text would not earn back.
#[cfg(feature = "cube")]
const CAPTURED_AFTER: usize = 3;

/// Goes on from a filled [`Cache`], a token of every sequence at a time.
///
/// On CubeCL devices it runs kernels of its own, bound by the memory's rate, for up to 8 sequences, and where the device
/// can, it captures their launches in a graph once and replays it. That holds for models whose parameters all have one of the
/// dtypes f32, f16 and bf16, with up to 512 experts; all else goes through [`Gemma4Model::step`], which computes the same. Sequences with padding are moved to
/// their buffers' beginnings for it, once, and are as fast as others.
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
    drafter: Option<&'a Drafter>,
    /// Whether kernels serve the drafter.
    #[cfg(feature = "cube")]
    has_drafter_kernels: bool,
    /// Whether samplers are to draw, on the device or not.
    #[cfg(feature = "cube")]
    has_samplers: bool,
    #[cfg(feature = "cube")]
    graph: Option<GraphCapture>,
    /// A replay is ordered after what the capturing thread has put on the device, and after nothing else.
    _of_one_thread: PhantomData<*const ()>,
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
            drafter: None,
            #[cfg(feature = "cube")]
            has_drafter_kernels: false,
            #[cfg(feature = "cube")]
            has_samplers: false,
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
            && self.cache.has_begun()
        {
            return Ok(graph.step(self.model, self.cache, tokens).into());
        }
        self.plain_step(tokens, 1)
    }

    /// Reads one more token of each sequence and gives the next: the likeliest, or what the [samplers](Self::with_samplers) draw, if the device draws them;
    /// nothing for a sequence without any, every logit of which is NaN or −∞.
    ///
    /// It gives what [`step`](Self::step) and [`Next::argmax`] or [`Next::sample`] would, but samplers do not read it. Where the caller `goes_on`, what
    /// reads the given tokens is put on the device before they have come to the host, which the device then never waits for: the next call takes it up, if
    /// it is with these tokens. With others it reads those, and the work was for nothing, but that tokens which were drawn and not taken count for a repetition penalty.
    ///
    /// `None` where tokens are not chosen on the device, as on a processor, or where samplers were given that the host has to draw for.
    ///
    /// # Errors
    /// As [`step`](Self::step), and [`Gemma4Error::Device`] where the device failed.
    pub fn follow(
        &mut self,
        tokens: &[u32],
        goes_on: bool,
    ) -> Result<Option<Vec<Option<u32>>>, Gemma4Error> {
        self.check(tokens)?;
        #[cfg(feature = "cube")]
        if let Some(graph) = &mut self.graph
            && self.cache.has_begun()
            && graph.draws() == self.has_samplers
        {
            let next = graph.follow(self.model, self.cache, tokens, goes_on)?;
            return Ok(Some(next));
        }
        let _ = goes_on;
        Ok(None)
    }

    /// Reads several more tokens of the only sequence, in one pass: what comes after each of them. With a cache that
    /// [may forget](Cache::forgetting) columns, up to 8 tokens, and one more than it may forget, go through the kernels of
    /// [`step`](Self::step), captured once for each number of them, and [`forget`](Self::forget) takes back those that turn out wrong.
    ///
    /// # Errors
    /// Where the cache has several sequences, where there are no tokens, and where one is outside the vocabulary.
    pub fn read(&mut self, tokens: &[u32]) -> Result<Next<'_>, Gemma4Error> {
        let refuse = |reason: String| {
            let argument = "tokens";
            Err(Gemma4Error::Argument { argument, reason })
        };
        match (self.cache.batch(), tokens.len()) {
            (_, 0) => refuse("are none; there should be at least 1".into()),
            (1, _) => self.read_each(tokens),
            (batch, _) => refuse(format!("are of one sequence, but the cache has {batch}")),
        }
    }

    /// [`read`](Self::read) of as many tokens of each sequence, one sequence after the other, of which there is one at least.
    pub(crate) fn read_each(&mut self, tokens: &[u32]) -> Result<Next<'_>, Gemma4Error> {
        self.check_vocabulary(tokens)?;
        let count = tokens.len() / self.cache.batch();
        #[cfg(feature = "cube")]
        if self.cache.has_begun()
            && self.fits_kernels(self.cache.batch(), count)
            && let Some(graph) = &mut self.graph
        {
            return Ok(graph.step(self.model, self.cache, tokens).into());
        }
        self.plain_step(tokens, count)
    }

    /// Whether kernels take so many tokens of each sequence. They write all before any of them looks: a ring must have slots for those after the first.
    #[cfg(feature = "cube")]
    fn fits_kernels(&self, batch: usize, count: usize) -> bool {
        batch * count <= MOST_ROWS && count <= 1 + self.cache.spare()
    }

    /// With a drafter for [`guess`](Self::guess).
    ///
    /// # Errors
    /// [`Gemma4Error::Argument`] where it is not for this model, or in another dtype or on another device.
    pub fn with_drafter(self, drafter: &'a Drafter) -> Result<Self, Gemma4Error> {
        drafter.check(self.model)?;
        Ok(Self {
            // Rounds are of the drafter before it.
            #[cfg(feature = "cube")]
            graph: self.graph.map(GraphCapture::without_rounds),
            #[cfg(feature = "cube")]
            has_drafter_kernels: FewRows::serve(&drafter.model, self.cache.batch()),
            drafter: Some(drafter),
            ..self
        })
    }

    /// With samplers, one a sequence, that have read what the cache holds and the token after it: where the device draws, each
    /// [`step`](Self::step) draws the next tokens with what else it computes, for [`Next::sample`] to read. They count on being given what
    /// they have drawn.
    ///
    /// # Errors
    /// [`Gemma4Error::Argument`] where there is not one for each of the cache's sequences.
    pub fn with_samplers(self, samplers: &[&Sampler]) -> Result<Self, Gemma4Error> {
        check_samplers(samplers.len(), self.cache.batch())?;
        #[cfg(feature = "cube")]
        {
            let model = self.model;
            let (vocabulary, device) = (model.config().vocab_size, model.device());
            let sampler = DeviceSampler::new(samplers, vocabulary, model.dtype(), &device);
            let graph = self.graph.map(|graph| graph.with_sampler(sampler));
            Ok(Self {
                graph,
                has_samplers: true,
                ..self
            })
        }
        #[cfg(not(feature = "cube"))]
        Ok(self)
    }

    /// Has the [drafter](Self::with_drafter) guess `count` tokens after `token`, which comes after what was read and has not been read
    /// itself: as [`Drafter::draft`], captured once for each count like the passes of [`read`](Self::read).
    ///
    /// # Errors
    /// As [`Drafter::draft`], and where there is no drafter.
    pub fn guess(
        &mut self,
        token: u32,
        hidden: Tensor<2>,
        count: usize,
    ) -> Result<Guesses, Gemma4Error> {
        let drafter = self.drafter()?;
        drafter.check_call(self.cache, token, hidden.dims(), count)?;
        let streams = Streams {
            rows: hidden,
            of: vec![0],
        };
        self.guess_each(&[token], &streams, count)
    }

    /// [`guess`](Self::guess)es, and [`read`](Self::read)s the token and the guesses in one pass, which finds them on the device: the host waits for both at once.
    /// `hidden`, `[rows, hidden]`, has in its row `row` what the token's logits were made of.
    ///
    /// # Errors
    /// As [`guess`](Self::guess), and where the row is not there.
    pub fn guess_and_read(
        &mut self,
        token: u32,
        hidden: Tensor<2>,
        row: usize,
        count: usize,
    ) -> Result<(GuessedTokens, Next<'_>), Gemma4Error> {
        let [rows, columns] = hidden.dims();
        let drafter = self.drafter()?;
        drafter.check_call(self.cache, token, [1, columns], count)?;
        if row >= rows {
            return Err(Gemma4Error::Argument {
                argument: "row",
                reason: format!("is {row}, but there are {rows} rows"),
            });
        }
        let streams = Streams {
            rows: hidden,
            of: vec![row],
        };
        self.guess_and_read_each(&[token], &streams, count)
    }

    /// [`guess_and_read`](Self::guess_and_read) of all sequences, a token of each: the guesses are one step's after the other, what comes next one sequence's after
    /// the other.
    pub(crate) fn guess_and_read_each(
        &mut self,
        tokens: &[u32],
        streams: &Streams,
        count: usize,
    ) -> Result<(GuessedTokens, Next<'_>), Gemma4Error> {
        #[cfg(feature = "cube")]
        {
            let drafter = self.drafter()?;
            // Rows of a table on the host are found by tokens on the host.
            let reads_guesses = self.has_drafter_kernels
                && self.model.host_table.is_none()
                && self.cache.has_begun()
                && self.fits_kernels(tokens.len(), 1 + count);
            if reads_guesses && let Some(graph) = &mut self.graph {
                let (guesses, next) =
                    graph.guess_and_read(drafter, self.model, self.cache, tokens, streams, count);
                return Ok((GuessedTokens::on_the_way(guesses), next.into()));
            }
        }
        let guesses = self.guess_each(tokens, streams, count)?.tokens()?;
        let mut read = Vec::with_capacity(tokens.len() * (1 + count));
        for (row, token) in tokens.iter().enumerate() {
            read.push(*token);
            read.extend(guesses[row..].iter().step_by(tokens.len()));
        }
        let next = self.read_each(&read)?;
        Ok((GuessedTokens::known(guesses), next))
    }

    /// [`guess`](Self::guess) of all sequences, after a token of each: as [`Drafter::guess`].
    fn guess_each(
        &mut self,
        tokens: &[u32],
        streams: &Streams,
        count: usize,
    ) -> Result<Guesses, Gemma4Error> {
        let drafter = self.drafter()?;
        #[cfg(feature = "cube")]
        {
            if let Some(graph) = &mut self.graph {
                if self.has_drafter_kernels {
                    let (model, cache) = (self.model, &mut *self.cache);
                    return Ok(graph.guess(drafter, model, cache, tokens, streams, count));
                }
                if self.cache.is_padded() {
                    // Its buffers are to be turned back.
                    graph.release();
                }
            }
            self.cache.turn_back();
        }
        Ok(drafter.guess(self.model, self.cache, tokens, streams.of_each(), count))
    }

    fn drafter(&self) -> Result<&'a Drafter, Gemma4Error> {
        self.drafter.ok_or_else(|| Gemma4Error::Argument {
            argument: "drafter",
            reason: "is missing: Decoder::with_drafter gives one".into(),
        })
    }

    /// Forgets the last `count` columns that were read: see [`Cache::forget`].
    ///
    /// # Errors
    /// Where the cache cannot.
    pub fn forget(&mut self, count: usize) -> Result<(), Gemma4Error> {
        self.leave_what_is_ahead();
        self.cache.forget(count)
    }

    /// Forgets so many of each sequence's last columns.
    ///
    /// # Errors
    /// Where the cache cannot.
    pub(crate) fn forget_each(&mut self, counts: &[usize]) -> Result<(), Gemma4Error> {
        self.leave_what_is_ahead();
        self.cache.forget_each(counts)
    }

    /// A pass that is under way is for the column after the last one that was read.
    fn leave_what_is_ahead(&mut self) {
        #[cfg(feature = "cube")]
        if let Some(graph) = &mut self.graph {
            graph.leave_what_is_ahead();
        }
    }

    /// Tokens that there are.
    pub(crate) fn vocabulary(&self) -> usize {
        self.model.config().vocab_size
    }

    /// What it has read.
    pub fn cache(&self) -> &Cache {
        self.cache
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
            && self.cache.has_begun()
        {
            return Ok(graph
                .step_by_parts(self.model, self.cache, tokens, after)
                .into());
        }
        let _ = after;
        self.plain_step(tokens, 1)
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
        self.check_vocabulary(tokens)
    }

    fn check_vocabulary(&self, tokens: &[u32]) -> Result<(), Gemma4Error> {
        let tokens = tokens.iter().map(|token| i64::from(*token));
        self.model.config().check_tokens(tokens)
    }

    /// Reads `count` tokens of each sequence through the layers.
    fn plain_step(&mut self, tokens: &[u32], count: usize) -> Result<Next<'_>, Gemma4Error> {
        #[cfg(feature = "cube")]
        if let Some(graph) = &mut self.graph {
            graph.release();
        }
        let device = self.model.device();
        let shape = [tokens.len() / count, count];
        let tokens = Tokens::upload(tokens.to_vec(), shape, &device);
        let hidden = self.model.step_hidden(&tokens, self.cache, Logits::All)?;
        let hidden = hidden.expect("positions are asked for");
        Ok(Next::of_hidden(self.model, hidden))
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

/// Refuses another number of samplers than there are sequences.
fn check_samplers(samplers: usize, sequences: usize) -> Result<(), Gemma4Error> {
    match samplers == sequences {
        true => Ok(()),
        false => Err(Gemma4Error::Argument {
            argument: "samplers",
            reason: format!("are {samplers}, but there are {sequences} sequences"),
        }),
    }
}

#[cfg(feature = "cube")]
fn integers(tokens: &[u32]) -> Vec<i32> {
    tokens.iter().map(|token| *token as i32).collect()
}
