//! Names the formats of video files that this crate does not decode.

/// Refuses a video file by the name of its format, with a command that writes its frames. `bytes` is the beginning of
/// the file. Other files pass.
pub(super) fn check_supported(bytes: &[u8]) -> Result<(), String> {
    match format_of(bytes) {
        None => Ok(()),
        Some(format) => Err(format!(
            "is {format} video, which is not decoded here; write its frames to a folder by `mkdir FOLDER && ffmpeg -i FILE -vf fps=1 FOLDER/%05d.jpg`, and show the folder with fps 1"
        )),
    }
}

/// Returns the name of a video format with its article, or `None` for other contents.
fn format_of(bytes: &[u8]) -> Option<&'static str> {
    let at = |start: usize, signature: &[u8]| {
        let found = bytes.get(start..).unwrap_or_default();
        found.starts_with(signature)
    };
    let formats = [
        (at(4, b"ftypqt"), "a QuickTime (MOV)"),
        (at(4, b"ftyp"), "an MP4"),
        (
            at(4, b"moov") || at(4, b"mdat") || at(4, b"wide"),
            "a QuickTime (MOV)",
        ),
        (at(0, &[0x1A, 0x45, 0xDF, 0xA3]), "a Matroska (MKV or WebM)"),
        (at(0, b"RIFF") && at(8, b"AVI "), "an AVI"),
        (at(0, b"FLV"), "an FLV"),
        (at(0, b"OggS"), "an Ogg"),
        (
            at(0, &[0, 0, 1, 0xBA]) || at(0, &[0, 0, 1, 0xB3]),
            "an MPEG",
        ),
        (at(0, &[0x30, 0x26, 0xB2, 0x75]), "a Windows Media (WMV)"),
    ];
    let found = formats.into_iter().find(|(is_format, _)| *is_format);
    found.map(|(_, format)| format)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_supported_of_video_formats_names_each() {
        for (bytes, name) in [
            (&b"\0\0\0\x18ftypisom"[..], "an MP4"),
            (b"\0\0\0\x14ftypqt  ", "MOV"),
            (b"\0\0\0\x08wide", "MOV"),
            (&[0x1A, 0x45, 0xDF, 0xA3, 0], "WebM"),
            (b"RIFF\0\0\0\0AVI LIST", "AVI"),
            (b"FLV\x01", "FLV"),
            (b"OggS", "Ogg"),
            (&[0, 0, 1, 0xBA], "MPEG"),
            (&[0x30, 0x26, 0xB2, 0x75, 0x8E], "WMV"),
        ] {
            let reason = check_supported(bytes).expect_err(name);
            assert!(
                reason.contains(name) && reason.contains("ffmpeg"),
                "{reason}"
            );
        }
        for bytes in [
            &b""[..],
            b"GIF89a",
            b"\x89PNG\r\n\x1a\n",
            b"RIFF\0\0\0\0WEBP",
        ] {
            check_supported(bytes).expect("the file is not a video format");
        }
    }
}
