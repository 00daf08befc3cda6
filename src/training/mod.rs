//! Training Gemma 4 with Burn's learner: what the programs `train` and `finetune` share, and what texts cost a model ([`evaluation`]).
//!
//! Text becomes rows of packed documents ([`corpus`], [`documents`], [`conversations`], [`vocabulary`], [`rows`]), rows become batches in an
//! order that a seed and the number of the step determine ([`loader`]), and a step's batches a loss and gradients ([`trainee`],
//! [`gradients`]), which several devices ([`averaging`], [`buckets`]) or processes ([`world`]) add up. The optimizer computes in f32 ([`mod@optimizer`], [`masters`], [`loss_scale`]).
//! [`run`] puts them into Burn's learner. What the learner calls an epoch is here the steps between two checkpoints, since it
//! validates, writes checkpoints and resumes at the ends of epochs only; so a run goes on exactly where its last checkpoint
//! is, in the middle of a pass over the data ([`checkpoints`], [`resume`]). One that is stopped ends its epoch early ([`stop`]).

pub mod arguments;
pub mod averaging;
pub mod buckets;
pub mod checkpoints;
pub mod conversations;
pub mod corpus;
pub mod documents;
pub mod evaluation;
pub mod factor;
pub mod gradients;
pub mod lines;
pub mod loader;
pub mod loss_scale;
pub mod masters;
pub mod optimizer;
pub mod presets;
pub mod recorder;
pub mod resume;
pub mod rows;
pub mod run;
pub mod skipped;
pub mod stop;
pub mod trainee;
pub mod vocabulary;
pub mod world;
