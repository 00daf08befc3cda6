//! What graphics drivers do when a program starts, and what is done about it before.

/// Starts the program anew without the layer by which Mesa's drivers sort devices: that one asks a display server, and where
/// there is none, as on a server, complains on standard error each time devices are listed. What it sorts by is of no use here.
///
/// Does nothing where the layer was left out already, or where a session names its display server's folder. The layer is left out
/// through the environment, which a running program must not change; should starting anew fail, this goes on as it is.
pub fn leave_out_device_selection() {
    #[cfg(target_os = "linux")]
    {
        use std::env;
        use std::os::unix::process::CommandExt;

        const LEFT_OUT: &str = "NODEVICE_SELECT";
        let is_set = |name: &str| env::var_os(name).is_some();
        if is_set(LEFT_OUT) || is_set("XDG_RUNTIME_DIR") {
            return;
        }
        let (Ok(program), mut arguments) = (env::current_exe(), env::args_os()) else {
            return;
        };
        let name = arguments.next().unwrap_or_else(|| program.clone().into());
        // It returns where that failed.
        let _ = std::process::Command::new(program)
            .arg0(name)
            .args(arguments)
            .env(LEFT_OUT, "1")
            .exec();
    }
}
