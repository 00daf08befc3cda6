//! The attention engines. Each engine is a folder with its plan, tiles, kernels and launch. To add an engine, add its folder,
//! its module here, and a line to the list in `types/engine.rs`.

pub mod api;
#[cfg(feature = "cube")]
pub(crate) mod backward_pass;
pub mod bias_gradient;
#[cfg(feature = "cube")]
pub(crate) mod optional_inputs;
pub mod portable;
pub mod table_gradient;
pub mod tensor_core;
pub mod tiling;

pub use self::api::AttentionEngine;
#[cfg(feature = "cube")]
pub use self::api::{Launch, RowScales};
use self::portable::{cmma, unit};
use self::tensor_core::{mma, wgmma};
#[cfg(feature = "cube")]
use crate::blocks;
use crate::problem::AttentionProblem;
use crate::types::device::DeviceProfile;
pub use crate::types::engine::Engine;
use crate::types::engine::with_engines;
use crate::types::refusal::{Refusal, Warning};
#[cfg(feature = "cube")]
use crate::types::request::BackwardRequest;
use crate::types::request::{Layouts, Pass};
#[cfg(feature = "cube")]
use crate::types::tensors::{AttentionGradients, AttentionInputs, AttentionOutput, AttentionSaved};
#[cfg(feature = "cube")]
use burn_cubecl::CubeBackend;

/// Defines [`ForwardKernel`] and [`BackwardKernel`], with one variant per engine in the list `with_engines`.
macro_rules! engines {
    ($($module:ident::$engine:ident if $feature:tt,)+) => {
        impl Engine {
            /// Returns the engine's forward plan, or its refusal.
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
                    Self::Blocks => Ok(ForwardKernel::Blocks),
                }
            }

            /// Returns the engine's backward plan, or its refusal.
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
                    Self::Blocks => Ok(BackwardKernel::Blocks),
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
                    Self::Blocks => Ok(ForwardKernel::Blocks),
                }
            }

            /// See [`AttentionEngine::MOST_QUANTIZED_ROWS`].
            pub(crate) fn most_quantized_rows(self) -> usize {
                match self {
                    $(Self::$engine => $module::$engine::MOST_QUANTIZED_ROWS,)+
                    Self::Blocks => 0,
                }
            }

            /// See [`AttentionEngine::goes_first`].
            pub(crate) fn goes_first(self, problem: &AttentionProblem, pass: Pass) -> bool {
                match self {
                    $(Self::$engine => $module::$engine::goes_first(problem, pass),)+
                    Self::Blocks => false,
                }
            }
        }

        /// The plan of a forward's kernels. Each engine has one variant, which holds the engine's own plan.
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
        pub enum ForwardKernel {
            $(
                #[doc = concat!("See [`", stringify!($module), "`](mod@", stringify!($module), ").")]
                $engine(<$module::$engine as AttentionEngine>::Forward),
            )+
            /// Burn's own operations on blocks of scores: see [`Engine::Blocks`].
            Blocks,
        }

        impl ForwardKernel {
            /// Returns the engine that provides the kernels.
            pub fn engine(&self) -> Engine {
                match self {
                    $(Self::$engine(_) => Engine::$engine,)+
                    Self::Blocks => Engine::Blocks,
                }
            }

            /// Returns the number of key splits (split-KV), or 1 without split-KV. If there are several splits, a
            /// second kernel combines their partial results.
            pub fn splits(&self) -> usize {
                match self {
                    $(Self::$engine(plan) => $module::$engine::splits(plan),)+
                    Self::Blocks => 1,
                }
            }

            /// See [`AttentionEngine::reads_pages`].
            pub(crate) fn reads_pages(&self, page_len: usize) -> bool {
                match self {
                    $(Self::$engine(plan) => $module::$engine::reads_pages(plan, page_len),)+
                    Self::Blocks => false,
                }
            }

            /// Computes the output and the logsumexp. The problem's tensors have at least one element.
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
                    Self::Blocks => blocks::forward::<CubeBackend>(inputs, problem),
                }
            }

            /// Computes the output and the logsumexp over quantized keys and values. The kernel reads the codes directly.
            #[cfg(feature = "cube")]
            pub(crate) fn forward_quantized(
                self,
                inputs: AttentionInputs<CubeBackend>,
                scales: RowScales,
                problem: &AttentionProblem,
            ) -> AttentionOutput<CubeBackend> {
                match self {
                    $(
                        #[cfg(feature = $feature)]
                        Self::$engine(plan) => {
                            $module::$engine::forward_quantized(plan, inputs, scales, problem)
                        }
                        #[cfg(not(feature = $feature))]
                        Self::$engine(_) => unreachable!(concat!(
                            stringify!($engine), " is refused in builds without the feature ", $feature
                        )),
                    )+
                    Self::Blocks => unreachable!("selection never gives quantized keys and values to `Blocks`"),
                }
            }
        }

        /// The plan of a backward's kernels. Each engine has one variant, which holds the engine's own plan.
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
        pub enum BackwardKernel {
            $(
                #[doc = concat!("See [`", stringify!($module), "`](mod@", stringify!($module), ").")]
                $engine(Box<<$module::$engine as AttentionEngine>::Backward>),
            )+
            /// Burn's own operations on blocks of scores: see [`Engine::Blocks`].
            Blocks,
        }

        impl BackwardKernel {
            /// Returns the engine that provides the kernels.
            pub fn engine(&self) -> Engine {
                match self {
                    $(Self::$engine(_) => Engine::$engine,)+
                    Self::Blocks => Engine::Blocks,
                }
            }

            /// Returns one warning for each guarantee of the [crate's documentation](crate) that the kernels do not meet.
            pub(crate) fn warnings(&self, problem: &AttentionProblem) -> Vec<Warning> {
                match self {
                    $(Self::$engine(plan) => $module::$engine::warnings(problem, plan),)+
                    Self::Blocks => Vec::new(),
                }
            }

            /// Computes the requested gradients. The problem's tensors must not be empty, and the saved output must be
            /// contiguous.
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
                    Self::Blocks => {
                        blocks::backward::<CubeBackend>(inputs, saved, problem, request)
                    }
                }
            }
        }
    };
}

/// The plan of the kernels of either a forward or a backward.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Kernel {
    /// The kernels of a forward, which compute the output and the logsumexp.
    Forward(ForwardKernel),
    /// The kernels of a backward, which compute gradients.
    Backward(BackwardKernel),
}

impl Kernel {
    /// Returns the engine that provides the kernels.
    pub fn engine(&self) -> Engine {
        match self {
            Self::Forward(kernel) => kernel.engine(),
            Self::Backward(kernel) => kernel.engine(),
        }
    }

    /// Returns the number of key splits, see [`ForwardKernel::splits`]. The number is 1 for a backward.
    pub fn splits(&self) -> usize {
        match self {
            Self::Forward(kernel) => kernel.splits(),
            Self::Backward(_) => 1,
        }
    }
}

with_engines!(engines);
