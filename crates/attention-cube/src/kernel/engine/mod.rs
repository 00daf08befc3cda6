//! How a tile product is done. One engine so far; what it shares with those to come lies beside this folder.

pub(crate) mod unit;
