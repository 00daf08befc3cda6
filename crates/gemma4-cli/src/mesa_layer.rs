//! A workaround for messages that graphics drivers print when a program starts.

/// Restarts the program without Mesa's Vulkan layer that sorts devices. Without a display server, this layer prints a
/// message on standard error each time devices are listed. The program does not need the layer's order of devices.
///
/// An environment variable disables the layer. The restart is necessary because a running program must not change its
/// own environment. The function does nothing if the layer is disabled already, or if `XDG_RUNTIME_DIR` indicates a
/// display server. If the restart fails, the program continues.
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
