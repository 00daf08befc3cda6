//! What a low-rank adapter adds to a product, as one operator with its gradients: as Burn's own operators it would be eight a matrix,
//! and as many again and more in the backward, of which an adapter of a small model is made of thousands a step.

use burn::{
    backend::{
        Autodiff, Backend, Dispatch, ExtensionType, TensorMetadata,
        autodiff::{
            NodeId,
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
        backend_extension,
        tensor::FloatTensor,
    },
    module::LoraAdapter,
    tensor::{FloatDType, Tensor},
};

/// `base + input · bᵀ · aᵀ · scale`, where `base` is what a matrix beneath the adapter makes of `input`. The factors, which may be in f32, are
/// multiplied in the input's dtype.
pub(crate) fn with_adapter(base: Tensor<2>, input: Tensor<2>, adapter: &LoraAdapter) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::add_low_rank(
        base.into_dispatch(),
        input.into_dispatch(),
        adapter.b.val().into_dispatch(),
        adapter.a.val().into_dispatch(),
        adapter.scale,
    ))
}

/// By the rows that the factors read, and by the factors, in their dtype.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct LowRankGradients<B: Backend> {
    pub input: FloatTensor<B>,
    pub reads: FloatTensor<B>,
    pub writes: FloatTensor<B>,
}

/// The operator of a backend. `reads` are `[rank, columns in]`, `writes` `[columns out, rank]`.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff,
    Fusion: cfg(feature = "cube")
)]
pub trait LowRankBackend: Backend {
    /// See [`with_adapter`].
    #[fusion(meta = |base, _input, _reads, _writes, _scale| base.clone())]
    fn add_low_rank(
        base: FloatTensor<Self>,
        input: FloatTensor<Self>,
        reads: FloatTensor<Self>,
        writes: FloatTensor<Self>,
        scale: f64,
    ) -> FloatTensor<Self>;

    /// Its gradients, but for that by `base`, which is `gradient`.
    #[fusion(meta = |_gradient, input, reads, writes, _scale| LowRankGradientsMetadata {
        input: input.clone(),
        reads: reads.clone(),
        writes: writes.clone(),
    })]
    fn low_rank_gradients(
        gradient: FloatTensor<Self>,
        input: FloatTensor<Self>,
        reads: FloatTensor<Self>,
        writes: FloatTensor<Self>,
        scale: f64,
    ) -> LowRankGradients<Self>;
}

/// The product of two matrices on a backend.
type Product<B> = fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>;

/// The factors, by which products are made on a backend.
struct Factors<B: Backend> {
    /// In the dtype of rows.
    reads: FloatTensor<B>,
    /// The same, times the scale.
    writes: FloatTensor<B>,
    product: Product<B>,
}

impl<B: Backend> Factors<B> {
    fn new(
        [reads, writes]: [FloatTensor<B>; 2],
        scale: f64,
        dtype: FloatDType,
        product: Product<B>,
    ) -> Self {
        let writes = B::float_mul_scalar(writes, scale.into());
        Self {
            reads: B::float_cast(reads, dtype),
            writes: B::float_cast(writes, dtype),
            product,
        }
    }

    fn add(self, base: FloatTensor<B>, input: FloatTensor<B>) -> FloatTensor<B> {
        let inner = (self.product)(input, B::float_transpose(self.reads));
        let added = (self.product)(inner, B::float_transpose(self.writes));
        B::float_add(base, added)
    }

    fn gradients(
        self,
        gradient: FloatTensor<B>,
        input: FloatTensor<B>,
        scale: f64,
        [of_reads, of_writes]: [FloatDType; 2],
    ) -> LowRankGradients<B> {
        let product = self.product;
        let inner = product(input.clone(), B::float_transpose(self.reads.clone()));
        let of_inner = product(gradient.clone(), self.writes);
        let reads = product(B::float_transpose(of_inner.clone()), input);
        let writes = product(B::float_transpose(gradient), inner);
        let writes = B::float_cast(writes, of_writes);
        LowRankGradients {
            input: product(of_inner, self.reads),
            reads: B::float_cast(reads, of_reads),
            writes: B::float_mul_scalar(writes, scale.into()),
        }
    }
}

#[cfg(feature = "cube")]
impl LowRankBackend for burn_cubecl::CubeBackend {
    fn add_low_rank(
        base: FloatTensor<Self>,
        input: FloatTensor<Self>,
        reads: FloatTensor<Self>,
        writes: FloatTensor<Self>,
        scale: f64,
    ) -> FloatTensor<Self> {
        let dtype = input.dtype().into();
        Factors::<Self>::new([reads, writes], scale, dtype, super::product_of_cube).add(base, input)
    }

    fn low_rank_gradients(
        gradient: FloatTensor<Self>,
        input: FloatTensor<Self>,
        reads: FloatTensor<Self>,
        writes: FloatTensor<Self>,
        scale: f64,
    ) -> LowRankGradients<Self> {
        let dtype = input.dtype().into();
        let dtypes = [reads.dtype().into(), writes.dtype().into()];
        Factors::<Self>::new([reads, writes], scale, dtype, super::product_of_cube)
            .gradients(gradient, input, scale, dtypes)
    }
}

#[cfg(feature = "flex")]
impl LowRankBackend for burn::backend::Flex {
    fn add_low_rank(
        base: FloatTensor<Self>,
        input: FloatTensor<Self>,
        reads: FloatTensor<Self>,
        writes: FloatTensor<Self>,
        scale: f64,
    ) -> FloatTensor<Self> {
        use burn::backend::ops::FloatTensorOps;
        let dtype = input.dtype().into();
        Factors::<Self>::new([reads, writes], scale, dtype, Self::float_matmul).add(base, input)
    }

    fn low_rank_gradients(
        gradient: FloatTensor<Self>,
        input: FloatTensor<Self>,
        reads: FloatTensor<Self>,
        writes: FloatTensor<Self>,
        scale: f64,
    ) -> LowRankGradients<Self> {
        use burn::backend::ops::FloatTensorOps;
        let dtype = input.dtype().into();
        let dtypes = [reads.dtype().into(), writes.dtype().into()];
        Factors::<Self>::new([reads, writes], scale, dtype, Self::float_matmul)
            .gradients(gradient, input, scale, dtypes)
    }
}

#[derive(Debug)]
struct LowRankBackward;

/// The rows that the factors read, and the factors.
#[derive(Clone, Debug)]
struct State {
    nodes: [NodeId; 3],
    scale: f64,
}

impl<B: LowRankBackend> Backward<B, 4> for LowRankBackward {
    type State = State;

    fn backward(
        self,
        ops: Ops<Self::State, 4>,
        gradients: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let State { nodes, scale } = ops.state;
        let [input, reads, writes] =
            nodes.map(|node| checkpointer.retrieve_node_output::<FloatTensor<B>>(node));
        let gradient = gradients.consume::<B>(&ops.node);
        let found = B::low_rank_gradients(gradient.clone(), input, reads, writes, scale);
        let found = [gradient, found.input, found.reads, found.writes];
        for (parent, gradient) in ops.parents.into_iter().zip(found) {
            if let Some(parent) = parent {
                gradients.register::<B>(parent.id, gradient);
            }
        }
    }
}

impl<B: LowRankBackend, C: CheckpointStrategy> LowRankBackend for Autodiff<B, C> {
    fn add_low_rank(
        base: FloatTensor<Self>,
        input: FloatTensor<Self>,
        reads: FloatTensor<Self>,
        writes: FloatTensor<Self>,
        scale: f64,
    ) -> FloatTensor<Self> {
        let nodes = [base.node(), input.node(), reads.node(), writes.node()];
        match LowRankBackward
            .prepare::<C>(nodes)
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(mut preparation) => {
                let nodes = [&input, &reads, &writes].map(|saved| preparation.checkpoint(saved));
                let [base, input, reads, writes] =
                    [base, input, reads, writes].map(|tensor| tensor.into_primitive());
                let sum = B::add_low_rank(base, input, reads, writes, scale);
                preparation.finish(State { nodes, scale }, sum)
            }
            OpsKind::UnTracked(preparation) => {
                let [base, input, reads, writes] =
                    [base, input, reads, writes].map(|tensor| tensor.into_primitive());
                preparation.finish(B::add_low_rank(base, input, reads, writes, scale))
            }
        }
    }

    fn low_rank_gradients(
        _gradient: FloatTensor<Self>,
        _input: FloatTensor<Self>,
        _reads: FloatTensor<Self>,
        _writes: FloatTensor<Self>,
        _scale: f64,
    ) -> LowRankGradients<Self> {
        unreachable!("gradients are of the first order: the backward runs on the inner backend")
    }
}
