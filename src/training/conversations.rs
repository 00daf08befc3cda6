//! Conversations and texts to fine-tune on, a JSON object a line.

use super::rows::Example;
use burn_gemma4::{ChatOptions, ChatTemplate, Gemma4, Gemma4Error, Marking, Prompt, Tokenizer};
use serde_json::{Map, Value};

/// What a line holds.
#[derive(Debug, PartialEq)]
pub(super) enum Line {
    /// `{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}`
    Messages(Conversation),
    /// `{"text": "…"}`
    Text(String),
}

/// Messages as the file has them.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Conversation {
    /// Objects with a role.
    messages: Vec<Value>,
    /// What else the line has, such as `tools`.
    variables: Map<String, Value>,
    /// Whether the model thinks before it answers.
    enable_thinking: bool,
}

/// The roles of messages, of which the model says one.
const ROLES: [&str; 5] = ["system", "developer", "user", ASSISTANT, "tool"];
const ASSISTANT: &str = "assistant";
/// What tools have said, in an assistant's message.
const TOOL_RESPONSES: &str = "tool_responses";

/// What a line of a file holds.
pub(super) fn parse(line: &str) -> Result<Line, String> {
    const EXPECTED: &str = "it should have one of \"messages\" and \"text\"";
    // Only the column says anything: the line is a text of its own to the parser.
    let broken = |error: serde_json::Error| format!("is no JSON, column {}", error.column());
    let Value::Object(mut fields) = serde_json::from_str(line).map_err(broken)? else {
        return Err(format!("is no JSON object; {EXPECTED}"));
    };
    match (fields.remove("messages"), fields.remove("text")) {
        (Some(messages), None) => conversation(messages, fields).map(Line::Messages),
        (None, Some(Value::String(text))) if !text.is_empty() => Ok(Line::Text(text)),
        (None, Some(_)) => Err("\"text\" is no text, or an empty one".into()),
        (Some(_), Some(_)) => Err(format!("has both; {EXPECTED}")),
        (None, None) => {
            let names: Vec<_> = fields.keys().map(|name| format!("{name:?}")).collect();
            Err(format!("has the fields {}; {EXPECTED}", names.join(", ")))
        }
    }
}

fn conversation(
    messages: Value,
    mut variables: Map<String, Value>,
) -> Result<Conversation, String> {
    let Value::Array(messages) = messages else {
        return Err("\"messages\" is no list".into());
    };
    for message in &messages {
        match message.get("role").and_then(Value::as_str) {
            Some(role) if ROLES.contains(&role) => (),
            Some(role) => {
                return Err(format!(
                    "\"messages\": {role:?} is none of the roles {ROLES:?}"
                ));
            }
            None => return Err("\"messages\": a message is no object with a \"role\"".into()),
        }
    }
    if !messages.iter().any(is_answer) {
        let reason = "\"messages\" has nothing to learn: no message of the role \"assistant\"";
        return Err(reason.into());
    }
    let enable_thinking = match variables.remove("enable_thinking") {
        None => false,
        Some(Value::Bool(is_enabled)) => is_enabled,
        Some(_) => return Err("\"enable_thinking\" is neither true nor false".into()),
    };
    Ok(Conversation {
        messages,
        variables,
        enable_thinking,
    })
}

fn is_answer(message: &Value) -> bool {
    message["role"] == ASSISTANT
}

/// The examples of a line.
pub(super) fn of_line(line: Line, gemma: &Gemma4) -> Result<Vec<Example>, String> {
    let said = |error: Gemma4Error| error.to_string();
    match line {
        Line::Text(text) => {
            // A text may have its beginning, as prompts may, and its end already, as templates write them.
            let mut tokens = gemma
                .tokens(&Prompt::Text(text), ChatOptions::default())
                .map_err(said)?
                .into_iter();
            let ends = &gemma.config().eos_tokens;
            let is_ended = |last: &u32| ends.contains(last);
            let end = match tokens.as_slice().last().is_some_and(is_ended) {
                true => None,
                false => ends.first().copied(),
            };
            let mut example = Example::default();
            example.extend(tokens.next(), false);
            example.extend(tokens.chain(end), true);
            Ok(vec![example])
        }
        Line::Messages(conversation) => {
            let marking = conversation.marking(gemma.tokenizer()).map_err(said)?;
            let marked = conversation.marked(marking).map_err(said)?;
            let pieces = marked.examples(gemma.chat_template())?;
            let of_pieces = |pieces: Vec<(String, bool)>| {
                let mut example = Example::default();
                for (text, learned) in pieces {
                    example.extend(marking.encode(&text)?, learned);
                }
                Ok(example)
            };
            let examples: Result<_, Gemma4Error> = pieces.into_iter().map(of_pieces).collect();
            examples.map_err(said)
        }
    }
}

/// The value with all its texts marked.
fn marked(value: &Value, marking: Marking<'_>) -> Result<Value, Gemma4Error> {
    Ok(match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
        Value::String(text) => Value::String(marking.mark(text)?),
        Value::Array(values) => values
            .iter()
            .map(|value| marked(value, marking))
            .collect::<Result<_, _>>()?,
        Value::Object(fields) => {
            let marked = |(name, value): (&String, &Value)| {
                Ok((marking.mark(name)?, marked(value, marking)?))
            };
            Value::Object(
                fields
                    .iter()
                    .map(marked)
                    .collect::<Result<_, Gemma4Error>>()?,
            )
        }
    })
}

/// What a template makes of a turn of the model.
struct Turn {
    /// What comes before it.
    before: String,
    /// Whose turn it is, and what a prompt adds to that: read, not said.
    opening: String,
    /// What is to be learned, through the end of the turn.
    answer: String,
    /// Whether it stands so in the whole conversation.
    stays: bool,
}

impl Conversation {
    /// For all that a template may render: JSON has the characters of texts as they are, but for those that no mark is.
    fn marking<'a>(&self, tokenizer: &'a Tokenizer) -> Result<Marking<'a>, Gemma4Error> {
        let rendered = self.messages.iter().chain(self.variables.values());
        let texts: Vec<String> = rendered.map(Value::to_string).collect();
        tokenizer.marking(texts.iter().map(String::as_str))
    }

    /// With marks where users, systems and tools spell special tokens, which are text in a chat, too. What the model says may have some of its own.
    fn marked(&self, marking: Marking<'_>) -> Result<Self, Gemma4Error> {
        let of_message = |message: &Value| {
            if !is_answer(message) {
                return marked(message, marking);
            }
            let mut answer = message.clone();
            if let Some(said) = answer.get_mut(TOOL_RESPONSES) {
                *said = marked(said, marking)?;
            }
            Ok(answer)
        };
        // A name of a special token, such as a `bos_token`, is one.
        let of_variable = |(name, value): (&String, &Value)| match value {
            Value::String(_) => Ok((name.clone(), value.clone())),
            value => Ok((name.clone(), marked(value, marking)?)),
        };
        Ok(Self {
            messages: self
                .messages
                .iter()
                .map(of_message)
                .collect::<Result<_, _>>()?,
            variables: self
                .variables
                .iter()
                .map(of_variable)
                .collect::<Result<_, Gemma4Error>>()?,
            enable_thinking: self.enable_thinking,
        })
    }

    fn render(
        &self,
        template: &ChatTemplate,
        messages: &[Value],
        add_generation_prompt: bool,
    ) -> Result<String, Gemma4Error> {
        if messages.is_empty() {
            return Ok(String::new());
        }
        let options = ChatOptions {
            add_generation_prompt,
            enable_thinking: self.enable_thinking,
            ..ChatOptions::default()
        };
        template.render_json(messages, &self.variables, options)
    }

    /// The texts of its examples in pieces: what is read, and what the model has to say. Each is to be encoded alone, as a
    /// prompt is when the model goes on from it.
    fn examples(&self, template: &ChatTemplate) -> Result<Vec<Vec<(String, bool)>>, String> {
        let said = |error: Gemma4Error| error.to_string();
        let until = self.beginnings(template).map_err(said)?;
        self.refuse_unrendered(template, &until)?;
        self.pieces(template, &until).map_err(said)
    }

    /// The texts of its first messages: none of them, one, two, and so on to all.
    fn beginnings(&self, template: &ChatTemplate) -> Result<Vec<String>, Gemma4Error> {
        (0..=self.messages.len())
            .map(|count| self.render(template, &self.messages[..count], false))
            .collect()
    }

    /// They are one example, if every turn of the model follows the text that it follows when it is generated. Where the template
    /// begins an answer with more than it leaves of it later, such as an empty thought, each turn is one.
    fn pieces(
        &self,
        template: &ChatTemplate,
        until: &[String],
    ) -> Result<Vec<Vec<(String, bool)>>, Gemma4Error> {
        let whole = &until[self.messages.len()];
        let answers = self.messages.iter().enumerate();
        let turns = answers
            .filter(|(_, message)| is_answer(message))
            .map(|(index, _)| self.turn(template, index, until))
            .collect::<Result<Vec<_>, _>>()?;
        if !turns.iter().all(|turn| turn.stays) {
            let apart =
                |turn: Turn| vec![(turn.before + &turn.opening, false), (turn.answer, true)];
            return Ok(turns.into_iter().map(apart).collect());
        }
        let mut pieces = Vec::new();
        let mut done = 0;
        for turn in turns {
            let start = turn.before.len() + turn.opening.len();
            pieces.push((whole[done..start].to_owned(), false));
            done = start + turn.answer.len();
            pieces.push((turn.answer, true));
        }
        Ok(vec![pieces])
    }

    fn turn(
        &self,
        template: &ChatTemplate,
        index: usize,
        until: &[String],
    ) -> Result<Turn, Gemma4Error> {
        let (before, after) = (&until[index], &until[index + 1]);
        let whole = &until[self.messages.len()];
        let prompt = self.render(template, &self.messages[..index], true)?;
        let Some(turn) = after.strip_prefix(before.as_str()) else {
            return Err(Gemma4Error::ChatTemplate(
                "it renders a message otherwise when an answer follows".into(),
            ));
        };
        let header = &turn[..turn.find('\n').map_or(turn.len(), |end| end + 1)];
        let asked = prompt.strip_prefix(before.as_str()).unwrap_or(header);
        // An answer with a thought of its own does without the prompt's.
        let added = asked.strip_prefix(header).unwrap_or_default();
        let (opening, read) = match turn.starts_with(asked) {
            true => (asked, asked.len()),
            false if added.is_empty() || begin_alike(added, &turn[header.len()..]) => {
                (header, header.len())
            }
            false => (asked, header.len()),
        };
        // The line end after the turn is not the model's.
        let end = turn.trim_end_matches('\n').len().max(read);
        Ok(Turn {
            stays: opening.len() == read && whole.starts_with(after.as_str()),
            opening: opening.to_owned(),
            answer: turn[read..end].to_owned(),
            before: before.clone(),
        })
    }

    /// Refuses fields without which the template renders the same, and contents of which it leaves something out.
    fn refuse_unrendered(&self, template: &ChatTemplate, until: &[String]) -> Result<(), String> {
        let whole = &until[self.messages.len()];
        for name in self.variables.keys() {
            let mut without = self.clone();
            without.variables.remove(name);
            // A template that refuses it without the field renders it.
            if matches!(without.render(template, &self.messages, false), Ok(text) if text == *whole)
            {
                return Err(format!("{name:?} is not rendered by the chat template"));
            }
        }
        for (index, message) in self.messages.iter().enumerate() {
            let fields = message.as_object().into_iter().flatten();
            // Earlier thoughts are left out when the conversation goes on.
            let until = &until[index + 1];
            for (name, value) in fields.filter(|(name, value)| *name != "role" && !is_empty(value))
            {
                let is_rendered = match value.as_str().filter(|_| name == "content") {
                    Some(content) => until.contains(content.trim()),
                    None => {
                        let mut without = self.messages[..=index].to_vec();
                        if let Some(fields) = without[index].as_object_mut() {
                            fields.remove(name);
                        }
                        let without = self.render(template, &without, false);
                        !matches!(without, Ok(text) if text == *until)
                    }
                };
                if !is_rendered {
                    let number = index + 1;
                    return Err(format!(
                        "{name:?} of message {number} is not rendered by the chat template, or not all of it"
                    ));
                }
            }
        }
        Ok(())
    }
}

fn begin_alike(a: &str, b: &str) -> bool {
    a.chars().next().is_some_and(|first| b.starts_with(first))
}

/// Whether there is nothing to render.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.trim().is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

impl Example {
    fn extend(&mut self, tokens: impl IntoIterator<Item = u32>, learned: bool) {
        self.tokens.extend(tokens);
        self.learned.resize(self.tokens.len(), learned);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_line(line: &str) -> Conversation {
        match parse(line).expect("a line") {
            Line::Messages(conversation) => conversation,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_answers_are_learned() {
        let conversation = read_line(
            r#"{"messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"},
                {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "See you."}
            ]}"#,
        );
        let template = ChatTemplate::gemma4();
        let pieces = conversation.examples(&template).expect("all of it");
        let expected = [
            (
                "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n",
                false,
            ),
            ("Hello!<turn|>", true),
            ("\n<|turn>user\nBye<turn|>\n<|turn>model\n", false),
            ("See you.<turn|>", true),
        ];
        assert_eq!(
            pieces,
            [expected.map(|(text, learned)| (text.to_owned(), learned))]
        );
    }

    /// As the larger models' templates do: tools, calls and answers, thoughts, and an empty thought before an answer without.
    const THINKING: &str = "{% if tools %}[{{ tools | length }}]{% endif %}\
        {% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n\
        {% if m.reasoning and loop.last %}<|channel>{{ m.reasoning }}<channel|>{% endif %}\
        {{ m.content }}{% for call in m.tool_calls or [] %}<|call>{{ call.function.name }}<call|>{% endfor %}\
        <turn|>\n{% endfor %}\
        {% if add_generation_prompt %}<|turn>model\n{% if not enable_thinking %}<|channel><channel|>{% endif %}{% endif %}";

    fn learned(line: &str) -> Result<Vec<Vec<(String, bool)>>, String> {
        let template = ChatTemplate::from_source(THINKING).expect("a template");
        read_line(line).examples(&template)
    }

    #[test]
    fn an_empty_thought_is_read_and_not_learned() {
        let found = learned(
            r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}"#,
        );
        let first = "<|turn>user\na<turn|>\n<|turn>model\n";
        let expected = [
            [
                (format!("{first}<|channel><channel|>"), false),
                ("b<turn|>".into(), true),
            ],
            [
                (
                    format!(
                        "{first}b<turn|>\n<|turn>user\nc<turn|>\n<|turn>model\n<|channel><channel|>"
                    ),
                    false,
                ),
                ("d<turn|>".into(), true),
            ],
        ];
        assert_eq!(found.expect("pieces"), expected.map(Vec::from));
    }

    #[test]
    fn thoughts_and_calls_of_tools_are_learned() {
        let found = learned(
            r#"{"tools": [{}], "enable_thinking": true, "messages": [{"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [{"function": {"name": "f"}}]},
                {"role": "tool", "content": "7"}, {"role": "assistant", "content": "b"}]}"#,
        );
        let first = "[1]<|turn>user\na<turn|>\n<|turn>model\n";
        let expected = [
            [
                (first.to_owned(), false),
                ("<|channel>hm<channel|><|call>f<call|><turn|>".into(), true),
            ],
            [
                (
                    format!("{first}<|call>f<call|><turn|>\n<|turn>tool\n7<turn|>\n<|turn>model\n"),
                    false,
                ),
                ("b<turn|>".into(), true),
            ],
        ];
        assert_eq!(found.expect("pieces"), expected.map(Vec::from));
    }

    #[test]
    fn what_is_not_rendered_is_named() {
        let gemma4 = ChatTemplate::gemma4();
        for (fields, words) in [
            (
                r#""content": "a", "mood": "good""#,
                ["\"mood\"", "message 1"],
            ),
            (
                r#""content": "a", "tool_calls": [{"function": {"name": "f"}}]"#,
                ["tool_calls", "message 1"],
            ),
            (
                r#""content": "<|channel>hm<channel|>a""#,
                ["\"content\"", "message 1"],
            ),
            (
                r#""content": "a"}], "source": [{"of": "b""#,
                ["\"source\"", "not rendered"],
            ),
        ] {
            let line = format!(r#"{{"messages": [{{"role": "assistant", {fields}}}]}}"#);
            let reason = read_line(&line).examples(&gemma4).expect_err(&line);
            for word in words {
                assert!(reason.contains(word), "{line}: {reason}");
            }
        }
        let empty = r#"{"messages": [{"role": "assistant", "content": "a", "tool_calls": [], "name": null}]}"#;
        read_line(empty)
            .examples(&gemma4)
            .expect("nothing is left out");
    }

    #[test]
    fn lines_of_other_kinds_are_explained() {
        for (line, word) in [
            (r#"{"text": "a""#, "column 12"),
            (r#"["a"]"#, "no JSON object"),
            (r#"{"mesages": [], "id": 3}"#, "\"id\", \"mesages\""),
            (r#"{"text": ""}"#, "\"text\""),
            (r#"{"text": "a", "messages": []}"#, "both"),
            (
                r#"{"messages": [{"role": "robot", "content": "a"}]}"#,
                "robot",
            ),
            (
                r#"{"messages": [{"role": "user", "content": "a"}]}"#,
                "assistant",
            ),
            (r#"{"messages": "a"}"#, "messages"),
        ] {
            let reason = parse(line).expect_err(line);
            assert!(reason.contains(word), "{line}: {reason}");
        }
        let text = parse(r#"{"id": 1, "text": "a"}"#).expect("a text");
        assert_eq!(text, Line::Text("a".into()));
    }

    /// Of the tools' descriptions and answers, too.
    #[cfg(feature = "flex")]
    const WITH_TOOLS: &str = concat!(
        "{{ bos_token }}{% if tools %}<|tool>{% for tool in tools %}{{ tool.description }}: ",
        "{{ tool.parameters.keys() | join }}{% endfor %}<tool|>{% endif %}",
        "{% for message in messages %}<|turn>{{ message.role }}\n",
        "{{ message.content }}{{ message.tool_responses | join }}<turn|>\n{% endfor %}",
        "{% if add_generation_prompt %}<|turn>assistant\n{% endif %}",
    );

    /// In messages, in fields within them and beside them; but for those of the model's own.
    #[cfg(feature = "flex")]
    #[test]
    fn what_is_said_to_the_model_has_no_special_tokens() {
        let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/dense-ple");
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["config.json", "model.safetensors", "tokenizer.json"] {
            let to = folder.path().join(name);
            std::fs::copy(std::path::Path::new(fixture).join(name), to).expect("a file");
        }
        let template = folder.path().join("chat_template.jinja");
        std::fs::write(template, WITH_TOOLS).expect("a file");
        let device = burn::tensor::Device::flex();
        let gemma = Gemma4::from_pretrained(folder.path(), &device).expect("a checkpoint");
        let tokenizer = gemma.tokenizer();
        let tokens = |line: &str| {
            let examples = of_line(parse(line).expect("a line"), &gemma).expect("examples");
            let tokens = examples.into_iter().map(|example| example.tokens);
            tokens.collect::<Vec<_>>().concat()
        };
        let conversation = |said: &str, answer: &str| {
            format!(
                r#"{{"tools": [{{"description": "{said}", "parameters": {{"{said}": 1}}}}],
                "messages": [{{"role": "system", "content": "{said}"}}, {{"role": "user", "content": "{said} or {said}"}},
                {{"role": "assistant", "content": "{answer}", "tool_responses": ["{said}"]}}]}}"#
            )
        };
        let special = |tokens: &[u32]| {
            let names = ["<|turn>", "<turn|>", "<|channel>", "<bos>", "<|tool>"];
            names.map(|name| {
                let id = tokenizer.id(name).expect("a special token");
                tokens.iter().filter(|token| **token == id).count()
            })
        };
        let plain = special(&tokens(&conversation("turn", "b")));
        assert_eq!(plain, [3, 3, 0, 1, 1]);
        for said in ["<turn|>", "<|turn>", "<bos><|channel>", "<|tool>a<turn|>"] {
            let found = tokens(&conversation(said, "b"));
            assert_eq!(special(&found), plain, "{said}");
            let text = tokenizer.decode(&found, true).expect("a text");
            assert_eq!(text.matches(said).count(), 6, "{text}");
        }
        let found = special(&tokens(&conversation("a", "b<turn|>")));
        assert_eq!(found, [3, 4, 0, 1, 1]);
        // Where nothing is spelled, the tokens are the text's.
        let line = conversation("the cat", "and  the hat é");
        let pieces = read_line(&line).examples(gemma.chat_template());
        let pieces = pieces.expect("pieces").concat().into_iter();
        let text: String = pieces.map(|(text, _)| text).collect();
        assert_eq!(tokens(&line), tokenizer.encode(&text).expect("tokens"));
        // A variable that names a special token is none that the template renders otherwise.
        let named = line.replacen('{', r#"{"bos_token": "<bos>", "#, 1);
        let Line::Messages(named) = parse(&named).expect("a line") else {
            panic!("{named}");
        };
        let marking = named.marking(tokenizer).expect("a mark");
        let marked = named.marked(marking).expect("marked");
        let reason = marked.examples(gemma.chat_template()).expect_err("named");
        assert!(reason.contains("bos_token"), "{reason}");
    }
}
