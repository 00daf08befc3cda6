//! The engines, each a folder with its plan, its tiles, its kernels and their launch. A new engine is a folder, its module here, and
//! its place in the list.

pub mod cmma;
pub mod mma;
pub mod unit;
pub mod wgmma;

use crate::AttentionProblem;
#[cfg(feature = "cube")]
use crate::backend::{AttentionGradients, AttentionInputs, AttentionOutput, AttentionSaved};
use crate::device::DeviceProfile;
#[cfg(feature = "cube")]
use crate::reference;
#[cfg(feature = "cube")]
use crate::select::BackwardRequest;
use crate::select::{Layouts, Refusal, Warning};
#[cfg(feature = "cube")]
use burn_cubecl::CubeBackend;
use std::fmt;

/// What an engine answers when it is asked. It asks no device, so that plans are tested without one.
pub trait AttentionEngine {
    /// The kernels of a forward; [`explain`](crate::explain) prints them.
    type Forward: Clone + fmt::Debug + PartialEq;
    /// The kernels of a backward.
    type Backward: Clone + fmt::Debug + PartialEq;

    /// Whether its forward for few rows reads keys and values [of int8](crate::quantized) where they lie.
    const READS_WORDS: bool = false;

    /// The forward of `problem` on `device`.
    ///
    /// # Errors
    /// Why it serves none.
    fn plan_forward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<Self::Forward, Refusal>;

    /// The forward of `problem` on `device` that adds up dots in the order in which the backward does: where scores are in the
    /// hundreds, another order changes probabilities that a backward makes of scores and of a logsumexp.
    ///
    /// # Errors
    /// Why it serves none.
    fn plan_forward_as_backward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<Self::Forward, Refusal> {
        Self::plan_forward(problem, device, layouts)
    }

    /// The backward of `problem` on `device`.
    ///
    /// # Errors
    /// Why it serves none.
    fn plan_backward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<Self::Backward, Refusal>;

    /// Parts that the keys are split into, side by side, whose results are combined: 1 where they are not.
    fn splits(plan: &Self::Forward) -> usize;

    /// Where a backward's kernels fall short of the contract.
    fn warnings(_problem: &AttentionProblem, _plan: &Self::Backward) -> Vec<Warning> {
        Vec::new()
    }
}

/// The launch of an engine's kernels, in builds that have these.
#[cfg(feature = "cube")]
pub trait Launch: AttentionEngine {
    /// The output and the logsumexp of a problem that is not empty.
    fn forward(
        plan: Self::Forward,
        inputs: AttentionInputs<CubeBackend>,
        problem: &AttentionProblem,
    ) -> AttentionOutput<CubeBackend>;

    /// The gradients that are asked for. The saved output is contiguous.
    fn backward(
        plan: Self::Backward,
        inputs: AttentionInputs<CubeBackend>,
        saved: AttentionSaved<CubeBackend>,
        problem: &AttentionProblem,
        request: BackwardRequest,
    ) -> AttentionGradients<CubeBackend>;
}

/// Makes [`Engine`], [`ForwardKernel`] and [`BackwardKernel`] of the engines, in the order in which they are asked. Each engine has the
/// Cargo feature that builds its kernels.
macro_rules! engines {
    ($($module:ident::$engine:ident if $feature:tt,)+) => {
        /// The ways there are to compute attention, the fastest first.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Engine {
            $(
                #[doc = concat!("See [`", stringify!($module), "`](mod@", stringify!($module), ").")]
                $engine,
            )+
            /// Burn's own tensor operations, with all scores in memory.
            Reference,
        }

        impl Engine {
            /// Those with kernels, in the order in which they are asked.
            pub(crate) const WITH_KERNELS: &'static [Self] = &[$(Self::$engine),+];

            /// The Cargo feature without which the engine's kernels are not built, if this build lacks the feature.
            #[cfg(feature = "cube")]
            pub(crate) fn missing_build_feature(self) -> Option<&'static str> {
                match self {
                    $(Self::$engine => (!cfg!(feature = $feature)).then_some($feature),)+
                    Self::Reference => None,
                }
            }

            /// The engine's forward plan.
            pub(crate) fn plan_forward(
                self,
                problem: &AttentionProblem,
                device: &DeviceProfile,
                layouts: Layouts,
            ) -> Result<ForwardKernel, Refusal> {
                match self {
                    $(
                        Self::$engine => $module::$engine::plan_forward(problem, device, layouts)
                            .map(ForwardKernel::$engine),
                    )+
                    Self::Reference => Ok(ForwardKernel::Reference),
                }
            }

            /// The engine's backward plan.
            pub(crate) fn plan_backward(
                self,
                problem: &AttentionProblem,
                device: &DeviceProfile,
                layouts: Layouts,
            ) -> Result<BackwardKernel, Refusal> {
                match self {
                    $(
                        Self::$engine => $module::$engine::plan_backward(problem, device, layouts)
                            .map(Box::new)
                            .map(BackwardKernel::$engine),
                    )+
                    Self::Reference => Ok(BackwardKernel::Reference),
                }
            }

            /// See [`AttentionEngine::plan_forward_as_backward`].
            #[cfg(feature = "cube")]
            pub(crate) fn plan_forward_as_backward(
                self,
                problem: &AttentionProblem,
                device: &DeviceProfile,
                layouts: Layouts,
            ) -> Result<ForwardKernel, Refusal> {
                match self {
                    $(
                        Self::$engine => {
                            $module::$engine::plan_forward_as_backward(problem, device, layouts)
                                .map(ForwardKernel::$engine)
                        }
                    )+
                    Self::Reference => Ok(ForwardKernel::Reference),
                }
            }

            /// See [`AttentionEngine::READS_WORDS`].
            pub(crate) fn reads_words(self) -> bool {
                match self {
                    $(Self::$engine => $module::$engine::READS_WORDS,)+
                    Self::Reference => false,
                }
            }
        }

        impl fmt::Display for Engine {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$engine => stringify!($module),)+
                    Self::Reference => "reference",
                })
            }
        }

        /// The kernels that serve a forward.
        #[derive(Clone, Debug, PartialEq)]
        pub enum ForwardKernel {
            $(
                #[doc = concat!("See [`", stringify!($module), "`](mod@", stringify!($module), ").")]
                $engine(<$module::$engine as AttentionEngine>::Forward),
            )+
            /// See [`Engine::Reference`].
            Reference,
        }

        impl ForwardKernel {
            /// The engine of the kernels.
            pub fn engine(&self) -> Engine {
                match self {
                    $(Self::$engine(_) => Engine::$engine,)+
                    Self::Reference => Engine::Reference,
                }
            }

            /// Parts that the keys are split into, side by side, whose results are combined: 1 where they are not.
            pub fn splits(&self) -> usize {
                match self {
                    $(Self::$engine(plan) => $module::$engine::splits(plan),)+
                    Self::Reference => 1,
                }
            }

            /// The output and the logsumexp of a problem that is not empty.
            #[cfg(feature = "cube")]
            pub(crate) fn forward(
                self,
                inputs: AttentionInputs<CubeBackend>,
                problem: &AttentionProblem,
            ) -> AttentionOutput<CubeBackend> {
                match self {
                    $(
                        #[cfg(feature = $feature)]
                        Self::$engine(plan) => $module::$engine::forward(plan, inputs, problem),
                        #[cfg(not(feature = $feature))]
                        Self::$engine(_) => unreachable!(concat!(
                            stringify!($engine), " is refused in builds without the feature ", $feature
                        )),
                    )+
                    Self::Reference => reference::forward_in_parts::<CubeBackend>(inputs, problem),
                }
            }
        }

        /// The kernels that serve a backward.
        #[derive(Clone, Debug, PartialEq)]
        pub enum BackwardKernel {
            $(
                #[doc = concat!("See [`", stringify!($module), "`](mod@", stringify!($module), ").")]
                $engine(Box<<$module::$engine as AttentionEngine>::Backward>),
            )+
            /// See [`Engine::Reference`].
            Reference,
        }

        impl BackwardKernel {
            /// The engine of the kernels.
            pub fn engine(&self) -> Engine {
                match self {
                    $(Self::$engine(_) => Engine::$engine,)+
                    Self::Reference => Engine::Reference,
                }
            }

            /// The points in which the kernels fall short of the contract.
            pub(crate) fn warnings(&self, problem: &AttentionProblem) -> Vec<Warning> {
                match self {
                    $(Self::$engine(plan) => $module::$engine::warnings(problem, plan),)+
                    Self::Reference => Vec::new(),
                }
            }

            /// The gradients of a problem that is not empty. The saved output is contiguous.
            #[cfg(feature = "cube")]
            pub(crate) fn backward(
                self,
                inputs: AttentionInputs<CubeBackend>,
                saved: AttentionSaved<CubeBackend>,
                problem: &AttentionProblem,
                request: BackwardRequest,
            ) -> AttentionGradients<CubeBackend> {
                match self {
                    $(
                        #[cfg(feature = $feature)]
                        Self::$engine(plan) => {
                            $module::$engine::backward(*plan, inputs, saved, problem, request)
                        }
                        #[cfg(not(feature = $feature))]
                        Self::$engine(_) => unreachable!(concat!(
                            stringify!($engine), " is refused in builds without the feature ", $feature
                        )),
                    )+
                    Self::Reference => {
                        reference::gradients::backward::<CubeBackend>(inputs, saved, problem, request)
                    }
                }
            }
        }
    };
}

/// The kernels that serve a pass.
#[derive(Clone, Debug, PartialEq)]
pub enum Kernel {
    /// Output and logsumexp.
    Forward(ForwardKernel),
    /// The gradients.
    Backward(BackwardKernel),
}

impl Kernel {
    /// The engine of the kernels.
    pub fn engine(&self) -> Engine {
        match self {
            Self::Forward(kernel) => kernel.engine(),
            Self::Backward(kernel) => kernel.engine(),
        }
    }

    /// See [`ForwardKernel::splits`]; 1 in a backward.
    pub fn splits(&self) -> usize {
        match self {
            Self::Forward(kernel) => kernel.splits(),
            Self::Backward(_) => 1,
        }
    }
}

engines! {
    wgmma::Wgmma if "cuda",
    mma::Mma if "cuda",
    cmma::Cmma if "cube",
    unit::Unit if "cube",
}
