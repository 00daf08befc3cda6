//! The commands of the program, with one module per command.

mod chat;
mod doctor;
mod embed;
#[cfg(feature = "training")]
mod evaluate;
#[cfg(feature = "training")]
mod finetune;
#[cfg(feature = "serve")]
mod prompts;
#[cfg(feature = "training")]
mod quantize;
mod run;
#[cfg(feature = "serve")]
mod serve;
#[cfg(feature = "serve")]
mod serve_embeddings;
#[cfg(feature = "serve")]
mod served_media;
#[cfg(feature = "training")]
mod train;

pub use chat::Chat;
pub use doctor::Doctor;
pub use embed::Embed;
#[cfg(feature = "training")]
pub use evaluate::Evaluate;
#[cfg(feature = "training")]
pub use finetune::Finetune;
#[cfg(feature = "training")]
pub use quantize::Quantize;
pub use run::Run;
#[cfg(feature = "serve")]
pub use serve::Serve;
#[cfg(feature = "training")]
pub use train::Train;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Run and train Gemma 4 models on this machine.
#[derive(Parser)]
#[command(name = "gemma4", version, arg_required_else_help = true)]
pub struct Gemma4 {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(Box<Run>),
    Chat(Box<Chat>),
    Embed(Box<Embed>),
    #[cfg(feature = "serve")]
    Serve(Box<Serve>),
    #[cfg(feature = "training")]
    Train(Box<Train>),
    #[cfg(feature = "training")]
    Finetune(Box<Finetune>),
    #[cfg(feature = "training")]
    Evaluate(Box<Evaluate>),
    #[cfg(feature = "training")]
    Quantize(Box<Quantize>),
    Doctor(Doctor),
}

impl Gemma4 {
    /// Executes the command and returns its exit code. If the command fails, its error message is printed.
    pub fn execute(self) -> ExitCode {
        match self.command {
            Command::Run(command) => command.execute(),
            Command::Chat(command) => command.execute(),
            Command::Embed(command) => command.execute(),
            #[cfg(feature = "serve")]
            Command::Serve(command) => command.execute(),
            #[cfg(feature = "training")]
            Command::Train(command) => command.execute(),
            #[cfg(feature = "training")]
            Command::Finetune(command) => command.execute(),
            #[cfg(feature = "training")]
            Command::Evaluate(command) => command.execute(),
            #[cfg(feature = "training")]
            Command::Quantize(command) => command.execute(),
            Command::Doctor(command) => command.execute(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_lines_are_consistent() {
        Gemma4::command().debug_assert();
    }
}
