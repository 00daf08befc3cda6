//! Layouts, shapes and wishes that once cost many times what their neighbours do, each beside its counterpart.

use crate::report::Pass::{self, Backward, Forward};
use attention_cube::{AttentionOptions, try_fused_attention};
use attention_workspace::{
    Dtype, Error,
    timing::{Effort, Timer},
};
use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor, TensorData};

/// An attention, and what is asked of it.
#[derive(Clone, Copy)]
pub struct Attention {
    batch: usize,
    heads: usize,
    length: usize,
    width: usize,
    causal: bool,
    /// Tokens of each of the documents that a sequence is packed of.
    document: Option<usize>,
    /// A bias of this shape.
    bias: Option<[usize; 4]>,
    /// Whether the bias is trained.
    trained_bias: bool,
    mask: Option<Mask>,
    /// All columns of a query are one number, with stride 0.
    flat_queries: bool,
    /// Whether query, keys and values are trained.
    trained: [bool; 3],
}

/// A mask that hides some keys, the same for all sequences and heads.
#[derive(Clone, Copy)]
enum Mask {
    /// `[1, 1, length, length]`.
    Own,
    /// The same with a stride of 0 along sequences and heads.
    Expanded,
}

/// An attention beside the one that it may cost so many times as much as.
pub struct Cliff {
    pub name: &'static str,
    pub pass: Pass,
    case: Attention,
    counterpart: Attention,
    pub limit: f64,
}

/// Milliseconds of either.
#[derive(serde::Serialize)]
pub struct Compared {
    pub case: f64,
    pub counterpart: f64,
}

impl Compared {
    pub fn ratio(&self) -> f64 {
        self.case / self.counterpart
    }
}

const fn attention([batch, heads, length, width]: [usize; 4], causal: bool) -> Attention {
    Attention {
        batch,
        heads,
        length,
        width,
        causal,
        document: None,
        bias: None,
        trained_bias: true,
        mask: None,
        flat_queries: false,
        trained: [true; 3],
    }
}

const fn cliff(
    name: &'static str,
    pass: Pass,
    case: Attention,
    counterpart: Attention,
    limit: f64,
) -> Cliff {
    Cliff {
        name,
        pass,
        case,
        counterpart,
        limit,
    }
}

/// So many documents of 1,024 tokens, packed into one sequence, and as a batch.
const fn packed(name: &'static str, pass: Pass, documents: usize, width: usize) -> Cliff {
    let heads = 1024 / width;
    cliff(
        name,
        pass,
        Attention {
            document: Some(1024),
            ..attention([1, heads, documents * 1024, width], true)
        },
        attention([documents, heads, 1024, width], true),
        1.3,
    )
}

const fn biased(name: &'static str, pass: Pass, bias: [usize; 4]) -> Cliff {
    let plain = attention([4, 32, 4096, 64], false);
    let case = Attention {
        bias: Some(bias),
        ..plain
    };
    cliff(name, pass, case, plain, 1.5)
}

/// The backward with a bias that is trained, beside the one with a bias that is not.
const fn trained_bias(name: &'static str, sizes: [usize; 4], bias: [usize; 4]) -> Cliff {
    let case = Attention {
        bias: Some(bias),
        ..attention(sizes, false)
    };
    let counterpart = Attention {
        trained_bias: false,
        ..case
    };
    cliff(name, Pass::Backward, case, counterpart, 1.5)
}

/// The backward with a bias that is trained, beside the one without a bias.
const fn whole_bias(name: &'static str, bias: [usize; 4]) -> Cliff {
    let plain = attention([4, 8, 2048, 64], false);
    let case = Attention {
        bias: Some(bias),
        ..plain
    };
    cliff(name, Pass::Backward, case, plain, 3.0)
}

const fn wide(name: &'static str, pass: Pass, width: usize) -> Cliff {
    cliff(
        name,
        pass,
        sized(width),
        sized(width.next_multiple_of(8)),
        1.5,
    )
}

const fn sized(width: usize) -> Attention {
    attention([4, 16, 2048, width], true)
}

const fn flat(name: &'static str, pass: Pass) -> Cliff {
    let case = Attention {
        flat_queries: true,
        ..sized(128)
    };
    cliff(name, pass, case, sized(128), 1.5)
}

const fn masked(name: &'static str, pass: Pass) -> Cliff {
    let plain = attention([4, 32, 4096, 128], false);
    cliff(
        name,
        pass,
        Attention {
            mask: Some(Mask::Expanded),
            ..plain
        },
        Attention {
            mask: Some(Mask::Own),
            ..plain
        },
        1.1,
    )
}

const fn frozen(name: &'static str, trained: [bool; 3], limit: f64) -> Cliff {
    let all = attention([4, 32, 4096, 128], true);
    let case = Attention { trained, ..all };
    cliff(name, Pass::Backward, case, all, limit)
}

pub const CLIFFS: [Cliff; 34] = [
    packed("cliffs-packed-d128", Forward, 256, 128),
    packed("cliffs-packed-d128", Backward, 256, 128),
    packed("cliffs-packed-d64", Forward, 256, 64),
    packed("cliffs-packed-d64", Backward, 256, 64),
    packed("cliffs-packed-d256", Forward, 256, 256),
    packed("cliffs-packed-d256", Backward, 256, 256),
    packed("cliffs-packed-d512", Forward, 128, 512),
    packed("cliffs-packed-d512", Backward, 128, 512),
    biased("cliffs-bias-1-1-1-1", Forward, [1, 1, 1, 1]),
    biased("cliffs-bias-1-1-1-1", Backward, [1, 1, 1, 1]),
    biased("cliffs-bias-1-h-1-1", Forward, [1, 32, 1, 1]),
    biased("cliffs-bias-1-h-1-1", Backward, [1, 32, 1, 1]),
    trained_bias(
        "cliffs-trained-pairs-d64",
        [4, 8, 2048, 64],
        [1, 8, 2048, 2048],
    ),
    trained_bias(
        "cliffs-trained-pairs-d128",
        [4, 8, 2048, 128],
        [1, 8, 2048, 2048],
    ),
    trained_bias(
        "cliffs-trained-table-d64",
        [4, 8, 2048, 64],
        [1, 1, 2048, 2048],
    ),
    trained_bias(
        "cliffs-trained-own-d64",
        [4, 8, 2048, 64],
        [4, 8, 2048, 2048],
    ),
    trained_bias(
        "cliffs-trained-one-d128",
        [1, 8, 2048, 128],
        [1, 8, 2048, 2048],
    ),
    trained_bias("cliffs-trained-keys-d64", [4, 8, 2048, 64], [1, 8, 1, 2048]),
    whole_bias("cliffs-trained-pairs-whole", [1, 8, 2048, 2048]),
    whole_bias("cliffs-trained-table-whole", [1, 1, 2048, 2048]),
    wide("cliffs-d100", Forward, 100),
    wide("cliffs-d100", Backward, 100),
    wide("cliffs-d90", Forward, 90),
    wide("cliffs-d90", Backward, 90),
    wide("cliffs-d33", Forward, 33),
    wide("cliffs-d33", Backward, 33),
    wide("cliffs-d250", Forward, 250),
    wide("cliffs-d250", Backward, 250),
    flat("cliffs-flat-queries", Forward),
    flat("cliffs-flat-queries", Backward),
    masked("cliffs-mask", Forward),
    masked("cliffs-mask", Backward),
    frozen("cliffs-only-query", [true, false, false], 0.6),
    frozen("cliffs-only-keys-values", [false, true, true], 0.8),
];

impl Cliff {
    /// Times both.
    pub fn measure(
        &self,
        device: &Device,
        dtype: Dtype,
        timer: &Timer,
        effort: Effort,
    ) -> Result<Compared, Error> {
        let time = |attention: &Attention| {
            let prepared = Prepared::new(attention, device, dtype.burn());
            let seconds = match self.pass {
                Pass::Forward => prepared.forward(timer, effort)?,
                Pass::Backward => prepared.backward(timer, effort)?,
            };
            // The next should find the memory that this took.
            drop(prepared);
            device.memory_cleanup();
            Ok::<_, Error>(1e3 * seconds)
        };
        Ok(Compared {
            case: time(&self.case)?,
            counterpart: time(&self.counterpart)?,
        })
    }
}

/// The data, without autodiff.
struct Prepared {
    operands: [Tensor<4>; 3],
    gradient: Tensor<4>,
    options: AttentionOptions,
    bias: Option<Tensor<4>>,
    trained: [bool; 3],
    trained_bias: bool,
}

impl Prepared {
    fn new(attention: &Attention, device: &Device, dtype: DType) -> Self {
        let Attention {
            batch,
            heads,
            length,
            width,
            ..
        } = *attention;
        let random = |shape: [usize; 4]| {
            let normal = Distribution::Normal(0.0, 1.0);
            Tensor::<4>::random(shape, normal, (device, DType::F32)).cast(dtype)
        };
        let shape = [batch, heads, length, width];
        let query = match attention.flat_queries {
            true => random([batch, heads, length, 1]).expand(shape),
            false => random(shape),
        };
        let mut options = AttentionOptions::new();
        if attention.causal {
            options = options.causal();
        }
        if let Some(document) = attention.document {
            let ids: Vec<i32> = (0..length).map(|token| (token / document) as i32).collect();
            let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, length]), device);
            options = options.segments(ids.clone(), ids);
        }
        if let Some(mask) = attention.mask {
            let own = random([1, 1, length, length]).greater_elem(-1.0);
            let mask: Tensor<4, Bool> = match mask {
                Mask::Own => own,
                Mask::Expanded => own.expand([batch, heads, length, length]),
            };
            options = options.mask(mask);
        }
        Self {
            operands: [query, random(shape), random(shape)],
            gradient: random(shape),
            options,
            bias: attention.bias.map(random),
            trained: attention.trained,
            trained_bias: attention.trained_bias,
        }
    }

    fn attend(
        &self,
        [query, key, value]: [Tensor<4>; 3],
        bias: Option<Tensor<4>>,
    ) -> Result<Tensor<4>, Error> {
        let options = match bias {
            Some(bias) => self.options.clone().bias(bias),
            None => self.options.clone(),
        };
        Ok(try_fused_attention(query, key, value, options)?)
    }

    fn forward(&self, timer: &Timer, effort: Effort) -> Result<f64, Error> {
        // First, because a launch that fails shows where its output is read, and nowhere else.
        let attend = || self.attend(self.operands.clone(), self.bias.clone());
        attend()?.slice([0..1, 0..1, 0..1, 0..1]).try_into_data()?;
        let run = |_| attend().map_err(drop);
        Ok(timer.singles(effort, || (), run)?.median)
    }

    /// Alone, under the loss `Σ output · g`, less the time of that loss on a leaf.
    fn backward(&self, timer: &Timer, effort: Effort) -> Result<f64, Error> {
        let loss = || -> Result<_, Error> {
            let mut leaves = Vec::new();
            let mut leaf = |tensor: &Tensor<4>, trained: bool| {
                let tensor = tensor.clone().autodiff();
                match trained {
                    true => {
                        let leaf = tensor.require_grad();
                        leaves.push(leaf.clone());
                        leaf
                    }
                    false => tensor,
                }
            };
            let operands = [0, 1, 2].map(|i| leaf(&self.operands[i], self.trained[i]));
            let bias = self.bias.as_ref().map(|bias| leaf(bias, self.trained_bias));
            let output = self.attend(operands, bias)?;
            Ok((leaves, output * self.gradient.clone().autodiff()))
        };
        let backward = |step: Result<(Vec<Tensor<4>>, Tensor<4>), Error>| {
            let (leaves, loss) = step.map_err(drop)?;
            let gradients = loss.backward();
            let gradient = |leaf: &Tensor<4>| leaf.grad(&gradients).ok_or(());
            leaves.iter().map(gradient).collect::<Result<Vec<_>, ()>>()
        };
        let gradients = backward(loss()).map_err(|()| "an input got no gradient")?;
        for gradient in gradients {
            gradient.slice([0..1, 0..1, 0..1, 0..1]).try_into_data()?;
        }
        let both = timer.singles(effort, loss, backward)?.median;
        let of_leaf = || {
            let leaf = self.gradient.clone().autodiff().require_grad();
            (leaf.clone(), leaf * self.gradient.clone().autodiff())
        };
        let alone = timer.singles(effort, of_leaf, |(leaf, loss): (Tensor<4>, Tensor<4>)| {
            leaf.grad(&loss.backward())
        })?;
        Ok((both - alone.median).max(0.0))
    }
}
