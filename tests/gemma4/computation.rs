//! Tests that every intermediate tensor of a whole forward equals the same tensor in Hugging Face Transformers.

use crate::fixture::{Fixture, on_every_device, tokens};
use burn::tensor::Tensor;
use burn_gemma4::observe::{LayerSite, Observer, Site};

/// An observer that compares the tensors of a forward with the tensors in the fixture.
struct Comparison<'a> {
    fixture: &'a Fixture,
    device: &'a str,
    compared: usize,
}

impl Observer for Comparison<'_> {
    fn observe<const D: usize>(&mut self, site: Site, tensor: impl FnOnce() -> Tensor<D>) {
        let name = match site {
            Site::Embedding => "embeds".into(),
            Site::PerLayerEmbeddings => "ple.inputs".into(),
            Site::FinalNorm => "final_norm".into(),
            Site::Layer(layer, site) => match site {
                LayerSite::Query => format!("attn.{layer}.q"),
                LayerSite::Key => format!("attn.{layer}.k"),
                LayerSite::Value => format!("attn.{layer}.v"),
                LayerSite::Attention => format!("attn.{layer}.out"),
                LayerSite::Mlp => format!("mlp.{layer}.out"),
                LayerSite::RouterProbabilities => format!("router.{layer}.probs"),
                LayerSite::RouterExperts => format!("router.{layer}.topk_idx"),
                LayerSite::RouterWeights => format!("router.{layer}.topk_w"),
                LayerSite::Experts => format!("experts.{layer}.out"),
                LayerSite::Output => format!("layer.{layer}.out"),
                other => panic!("a site without a reference: {other:?}"),
            },
            other => panic!("a site without a reference: {other:?}"),
        };
        let what = format!("{} {} {name}", self.fixture.name, self.device);
        match self.fixture.get(&name) {
            Some(reference) => {
                reference.assert_close(tensor(), &what);
                self.compared += 1;
            }
            // For the last layer, Hugging Face Transformers returns only the output after the final norm. The test
            // therefore does not compare the last layer's output before this norm.
            None => assert!(name.starts_with("layer."), "{what} is not in the reference"),
        }
    }
}

#[test]
fn forward_every_intermediate_tensor_equals_transformers() {
    on_every_device(|fixture, gemma, device| {
        let mut comparison = Comparison {
            fixture,
            device: device.name,
            compared: 0,
        };
        let input = tokens(&[&fixture.prompt], &device.device);
        let logits = gemma
            .model()
            .forward_observed(input, &mut comparison)
            .expect("the tokens are in the vocabulary");
        let what = format!("{} {} logits", fixture.name, device.name);
        fixture.reference("logits").assert_close(logits, &what);
        // The comparison covers the embedding and the final norm. For each layer, it also covers at least the queries, the
        // attention output and the MLP output.
        let layers = gemma.config().num_layers();
        assert!(comparison.compared >= 2 + 3 * layers, "{what}");
    });
}

#[test]
fn forward_batch_of_two_equals_transformers() {
    on_every_device(|fixture, gemma, device| {
        let rows: Vec<u32> = fixture
            .reference("batch2.input_ids")
            .values
            .iter()
            .map(|token| *token as u32)
            .collect();
        let (first, second) = rows.split_at(rows.len() / 2);
        let input = tokens(&[first, second], &device.device);
        let what = format!("{} {} batch", fixture.name, device.name);
        fixture.reference("batch2.logits").assert_close(
            gemma
                .model()
                .forward(input)
                .expect("the tokens are in the vocabulary"),
            &what,
        );
    });
}
