//! The command `gemma4 doctor`: reports what this machine and this build can do, as Markdown that owners can paste into an
//! issue.

mod attention;
mod devices;
mod machine;
mod measure;

use crate::{
    Error,
    device::{DeviceName, of_build},
    terminal::{Output, exit_code},
};
use clap::Parser;
use devices::DeviceReport;
use std::process::ExitCode;

/// Report the devices that this program can use, their kernels and speeds, and what is missing.
///
/// The report is Markdown, which you can paste into an issue. It contains no texts, no tokens and no names of your files.
#[derive(Parser)]
#[command(version)]
pub struct Doctor {
    /// Check only this backend [default: all backends of this build].
    #[arg(long, value_enum)]
    device: Option<DeviceName>,
    /// Leave out the measurements of speed.
    #[arg(long)]
    quick: bool,
}

impl Doctor {
    /// Executes the command and returns its exit code. The code is 1 if no device works.
    pub fn execute(self) -> ExitCode {
        exit_code(|| self.run())
    }

    fn run(&self) -> Result<(), Error> {
        let mut output = Output::default();
        let machine = machine::report();
        let mut advice = machine.advice;
        let mut works = false;
        // Print each part at once, because the measurements of the next part take seconds.
        let _ = output.write(&machine.text);
        let names = self.device.map_or_else(of_build, |name| vec![name]);
        for name in names {
            let report = DeviceReport::of(name, self.quick);
            works |= report.works;
            advice.extend(report.advice);
            let _ = output.write(&report.text);
        }
        if !works {
            output.finish()?;
            return Err(no_device(&advice).into());
        }
        let _ = output.write(&advice_text(&advice));
        output.finish()
    }
}

/// Returns the last part of the report: what the user can do to get more out of the machine.
fn advice_text(advice: &[String]) -> String {
    match advice.is_empty() {
        true => "\n## Advice\n\nNothing is missing.\n".into(),
        false => format!("\n## Advice\n\n- {}\n", advice.join("\n- ")),
    }
}

/// Returns the error of a machine on which no device works.
fn no_device(advice: &[String]) -> String {
    match advice.is_empty() {
        true => "no device works".into(),
        false => format!("no device works. {}", advice.join(" ")),
    }
}

/// Returns a table of two columns.
fn table(rows: &[(&str, String)]) -> String {
    let rows = rows
        .iter()
        .map(|(name, value)| format!("| {name} | {value} |\n"));
    format!("\n| | |\n|---|---|\n{}", rows.collect::<String>())
}

/// Returns a size in GiB.
fn gibibytes(bytes: usize) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_text_lists_each_advice_on_a_line() {
        let advice = ["one", "two"].map(String::from);
        assert_eq!(advice_text(&advice), "\n## Advice\n\n- one\n- two\n");
        assert!(advice_text(&[]).contains("Nothing is missing"));
        assert_eq!(no_device(&advice), "no device works. one two");
    }

    #[test]
    fn gibibytes_have_one_decimal() {
        assert_eq!(gibibytes(3 << 29), "1.5 GiB");
    }
}
