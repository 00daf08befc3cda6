//! A workaround for messages that graphics drivers print when a program starts.

/// Restarts the program without Mesa's Vulkan layer that sorts devices. This layer contacts a display server. Without a display
/// server, the layer prints a message on standard error each time devices are listed. The program does not need the layer's
/// order of devices.
///
/// The restart is necessary because the layer is disabled by an environment variable, and a running program must not change
/// its environment. The function does nothing if the layer is disabled already. It also does nothing if `XDG_RUNTIME_DIR` is
/// set. This variable names the folder of a display server, and with a display server the layer prints no message. If the
/// restart fails, the program continues.
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
        // The result is ignored, so that the program continues. `exec` returns only if the restart failed.
        let _ = std::process::Command::new(program)
            .arg0(name)
            .args(arguments)
            .env(LEFT_OUT, "1")
            .exec();
    }
}
