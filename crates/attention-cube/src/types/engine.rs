//! The names of the engines.

use std::fmt;

/// Calls a macro with the list of all engines in selection order. A list entry holds the engine's module, the engine's
/// type, and the Cargo feature that builds the engine's kernels.
macro_rules! with_engines {
    ($callback:ident) => {
        $callback! {
            wgmma::Wgmma if "cuda",
            mma::Mma if "cuda",
            cmma::Cmma if "cube",
            unit::Unit if "cube",
        }
    };
}
pub(crate) use with_engines;

macro_rules! names {
    ($($module:ident::$engine:ident if $feature:tt,)+) => {
        /// The implementations of attention, the fastest first.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Engine {
            $(
                #[doc = concat!("The engine of the module `", stringify!($module), "`.")]
                $engine,
            )+
            /// Burn's own tensor operations on blocks of scores. The engine serves every problem on every device.
            Blocks,
        }

        impl Engine {
            /// The engines with kernels, in the order in which selection tries them.
            pub(crate) const WITH_KERNELS: &'static [Self] = &[$(Self::$engine),+];

            /// If this build lacks the Cargo feature that builds the engine's kernels, returns the name of this
            /// feature. Otherwise returns `None`.
            #[cfg(feature = "cube")]
            pub(crate) fn missing_build_feature(self) -> Option<&'static str> {
                match self {
                    $(Self::$engine => (!cfg!(feature = $feature)).then_some($feature),)+
                    Self::Blocks => None,
                }
            }
        }

        impl fmt::Display for Engine {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$engine => stringify!($module),)+
                    Self::Blocks => "blocks",
                })
            }
        }
    };
}

with_engines!(names);
