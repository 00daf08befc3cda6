//! The inputs of the modules: sequences and their masks. All masks have the meaning of `burn-nn`'s masks: `true` hides a key.

use burn::tensor::{Bool, Device, Tensor};

/// The masks of an input. A key is visible if no mask hides it.
#[derive(Clone, Debug, Default)]
pub(super) struct Masks {
    /// The padding mask, `[batch, kv_len]`.
    pub pad: Option<Tensor<2, Bool>>,
    /// The attention mask, `[batch, q_len, kv_len]`.
    pub attn: Option<Tensor<3, Bool>>,
    pub causal: bool,
}

impl Masks {
    /// Returns the masks for a call with only the last query. Of `attn`, only the last row is kept.
    pub fn last_query(self) -> Self {
        Self {
            attn: self.attn.map(|attn| {
                let q_len = attn.dims()[1];
                attn.narrow(1, q_len.saturating_sub(1), 1)
            }),
            ..self
        }
    }

    /// Returns the mask of the keys that `pad` or `attn` hides. The causal mask is not included. A dimension of the
    /// result has size 1 if every given mask has size 1 in this dimension.
    ///
    /// # Shapes
    /// `[batch, 1, q_len, kv_len]`.
    pub fn hidden(self) -> Option<Tensor<4, Bool>> {
        let pad = self.pad.map(|pad| {
            let [batch, kv_len] = pad.dims();
            pad.reshape([batch, 1, 1, kv_len])
        });
        let attn = self.attn.map(|attn| attn.unsqueeze_dim::<4>(1));
        union(pad, attn)
    }

    /// Returns the mask of all hidden keys, the causal mask included.
    ///
    /// # Shapes
    /// `[batch, 1, q_len, kv_len]`.
    pub fn hidden_with_causal(
        self,
        [q_len, kv_len]: [usize; 2],
        device: &Device,
    ) -> Option<Tensor<4, Bool>> {
        let causal = self.causal.then(|| {
            // Align the causal mask at the bottom right: the last query sees the last key.
            let offset = kv_len as i64 - q_len as i64;
            Tensor::<2, Bool>::tril_mask([q_len, kv_len], offset, device).unsqueeze::<4>()
        });
        union(self.hidden(), causal)
    }
}

/// Returns the mask that hides a key if at least one of the two masks hides it.
fn union(
    first: Option<Tensor<4, Bool>>,
    second: Option<Tensor<4, Bool>>,
) -> Option<Tensor<4, Bool>> {
    let (first, second) = match (first, second) {
        (Some(first), Some(second)) => (first, second),
        (first, second) => return first.or(second),
    };
    let (has, other) = (first.dims(), second.dims());
    let shape: [usize; 4] = std::array::from_fn(|dim| match has[dim] {
        1 => other[dim],
        size => size,
    });
    let first = first.expand::<4, _>(shape);
    Some(first.bool_or(second.expand::<4, _>(shape)))
}

/// The input of [`MultiHeadAttention`](super::MultiHeadAttention).
///
/// The constructors and masks equal those of [`burn::nn::attention::MhaInput`]. [`causal`](Self::causal) replaces
/// [`generate_autoregressive_mask`](burn::nn::attention::generate_autoregressive_mask) and needs no mask tensor.
///
/// # Shapes
/// `query [batch, q_len, d_model]`, `key` and `value` `[batch, kv_len, d_model]`.
#[derive(Clone, Debug)]
pub struct MhaInput {
    pub(super) query: Tensor<3>,
    pub(super) key: Tensor<3>,
    pub(super) value: Tensor<3>,
    pub(super) masks: Masks,
}

impl MhaInput {
    /// Creates the input of self-attention, in which `tensor` is the query, the key and the value.
    ///
    /// # Shapes
    /// `tensor [batch, length, d_model]`.
    pub fn self_attn(tensor: Tensor<3>) -> Self {
        Self::new(tensor.clone(), tensor.clone(), tensor)
    }

    /// Creates an input.
    ///
    /// # Shapes
    /// `query [batch, q_len, d_model]`, `key` and `value` `[batch, kv_len, d_model]`.
    pub fn new(query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> Self {
        Self {
            query,
            key,
            value,
            masks: Masks::default(),
        }
    }

    /// Sets the padding mask: **`true` hides a key** from all queries of its sequence.
    ///
    /// # Shapes
    /// `mask_pad [batch, kv_len]`.
    pub fn mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.masks.pad = Some(mask_pad);
        self
    }

    /// Sets the attention mask: **`true` hides a key** from a query.
    ///
    /// # Shapes
    /// `mask_attn [batch, q_len, kv_len]`.
    pub fn mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.masks.attn = Some(mask_attn);
        self
    }

    /// Hides all keys after the query's own position. Positions are aligned at the bottom right: the last query sees
    /// the last key.
    pub fn causal(mut self) -> Self {
        self.masks.causal = true;
        self
    }
}

/// The input of [`FusedTransformerEncoder`](super::FusedTransformerEncoder).
///
/// The constructor and masks equal those of [`burn::nn::transformer::TransformerEncoderInput`].
///
/// # Shapes
/// `tensor [batch, length, d_model]`.
#[derive(Clone, Debug)]
pub struct TransformerEncoderInput {
    pub(super) tensor: Tensor<3>,
    pub(super) masks: Masks,
}

impl TransformerEncoderInput {
    /// Creates an input.
    ///
    /// # Shapes
    /// `tensor [batch, length, d_model]`.
    pub fn new(tensor: Tensor<3>) -> Self {
        Self {
            tensor,
            masks: Masks::default(),
        }
    }

    /// Sets the padding mask: **`true` hides a token**.
    ///
    /// # Shapes
    /// `mask_pad [batch, length]`.
    pub fn mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.masks.pad = Some(mask_pad);
        self
    }

    /// Sets the attention mask: **`true` hides a key** from a query.
    ///
    /// # Shapes
    /// `mask_attn [batch, length, length]`.
    pub fn mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.masks.attn = Some(mask_attn);
        self
    }

    /// Hides all tokens after the query's own position, without a mask tensor.
    pub fn causal(mut self) -> Self {
        self.masks.causal = true;
        self
    }
}
