"""The templates of the stories: how they begin, what happens in them, and how they end.

`tiny_grammar` says what a template is.
"""

from typing import Final

SETTINGS: Final = (
    "It was a [sunny|warm|beautiful] day.",
    "It was a [sunny|beautiful] morning.",
    "The sun was shining[ and the birds were singing|].",
    '"Good morning, {hero_call}!" said {hero_s} {parent}. "[The sun is shining|It is a beautiful'
    ' day]."',
    '"Have fun, {hero_call}!" said {hero_s} {parent} that [day|morning].',
)

LEADS: Final = (
    "One day, ",
    "One day, ",
    "One day, ",
    "One morning, ",
    "One sunny day, ",
    "One afternoon, ",
    "One sunny morning, ",
    "One warm day, ",
)

INTRODUCTIONS: Final = (
    "Once upon a time, there was {intro}.",
    "Once upon a time, there was {intro}.",
    "Once upon a time, there was {intro} who lived in {home}.",
    "Once upon a time, {intro} lived in {home}.",
    "There was {intro}.",
    "There once was {intro} who lived in {home}.",
    "There was once {intro} who loved to {hobby}.",
    "Long ago, there lived {intro}.",
    "Long, long ago, {intro} lived in {home}.",
    "In {home}, there lived {intro}.",
    "This is the story of {intro}.",
    "Hello! This is the story of {intro}.",
    "{Opener} was {trait} and liked to {hobby}.",
    "{Opener} lived in {home}.",
    "{Opener} loved to {hobby}.",
    "{Opener} was very {trait}.",
)

TRAIT_LINES: Final = (
    "{He} was very {trait}.",
    "{He} was {trait} and liked to {hobby}.",
    "{He} loved to {hobby}.",
    "{He} liked to {hobby} with {his} {parent}.",
    "{He} lived with {his} {parent}.",
    "Every day, {he} liked to {hobby}.",
    "Everybody liked {him}[ very much|].",
)

CLOSINGS: Final = (
    "",
    "",
    "",
    "The end.",
    "It was a [very |]good day.",
    "That night, {he} slept [very |]well.",
    "{He} would never forget that day.",
)

# A plot is a row of stages, each one or more sentences. The first stage starts with {lead}, and
# names the hero with {first}, which introduces a hero whom no sentence has introduced before.
SHORT_PLOTS: Final[dict[str, tuple[str, ...]]] = {
    "moon": (
        "{lead}{first} could not sleep. {He} looked out of the window and saw the"
        " [big |round ]moon.",
        '"Are you awake too, moon?" [asked|whispered] {hero}. The moon did not say anything, but it'
        " was bright and [kind|warm].",
        "{Hero} told the moon about {his} day. {He} told it about {sight}, and about {his} {toy}.",
        'Then {his} {parent} came in. "[Who are you talking to|Are you still awake]?" asked {his}'
        ' {parent}. "I am talking to the moon," said {hero}.',
        "{His} {parent} [smiled|laughed] and sat down on the bed. [Together they looked at the sky"
        "|They counted the stars together]. [Soon|After a while], {hero} was asleep.",
    ),
    "kite": (
        "{lead}{first} and {his} {parent} went {to_place}. They had a [new |big |]{color} kite.",
        "[At first there was no wind|There was no wind], and the kite did not fly. {Hero} was [sad"
        '|not happy]. "We must wait," said {his} {parent}.',
        "[Then|Soon], the wind came. {Hero} ran and ran, and the kite went up, up, up! It [danced"
        "|flew] high in the sky.",
        '"[Look|Look at that]! It is as high as the clouds!" {he} shouted. {His} {parent} laughed'
        " and clapped.",
        "They played until [the sun went down|it was dark]. Then they went home and ate {a_food}"
        "[ together|].",
    ),
    "picnic": (
        "{lead}{first} and {his} friend {friend} had a picnic {at_place}. They sat down {spot1} and"
        " opened the basket.",
        "But the basket was [almost |]empty! [Where was all the food|Where was the {food}]?"
        ' "Somebody ate our food," said {friend}.',
        "{Hero} looked around. There were little steps in the grass. [They went|The two friends"
        " followed them] {spot2}, and there sat a [tiny|little] mouse with a round belly.",
        '"I am sorry," said the mouse. "I was so hungry." {Hero} [laughed|smiled]. "Next time you'
        ' can just ask," {he} said.',
        "There was one {food} left, and they shared it[ with the mouse|]. [It was the best picnic"
        " of the year.|After that, the mouse came to every picnic.]",
    ),
    "puddle boat": (
        "{lead}it rained and rained. {First} sat at the window and had nothing to do.",
        "[Then|At last], the rain stopped, and {he} ran outside. There was a big puddle in front of"
        " the house.",
        '"[It looks like the sea|This is my sea]!" said {hero}. {He} made a little boat out of'
        " paper and put it on the water.",
        '{A_friend} came by. "[Can I play too|May I play with you]?" asked {friend}. "Yes! You can'
        ' make a boat too," said {hero}.',
        'They blew as hard as they could, and the boats sailed across the puddle. ["We are'
        ' captains!" shouted {friend}.|The two captains laughed and got very wet.]',
        "When {hero} came home, {his} {parent} gave {him} a dry [coat|blanket] and {a_food}.",
    ),
    "painting": (
        "{lead}{first} wanted to paint a picture of {his} {parent}. {He} took red, blue and yellow"
        " paint.",
        "{He} painted a [big|round] face and two eyes. Then, the paint fell over! There was a"
        " [big|large] {color} spot on the picture.",
        '"Oh no, now it is ugly," said {hero}, and {he} [was very sad|began to cry].',
        '{A_friend} looked at the picture. "[It is not ugly|Wait]. The spot looks like a {flying},"'
        ' said {friend}. "[Just give it wings|You can paint two wings]."',
        "So {hero} painted wings. It was a [beautiful|pretty] {color} {flying} next to {his}"
        " {parent}'s face!",
        '"[I love it|What a lovely picture]!" said {his} {parent}, and put it on the wall.',
    ),
    "song": (
        "{lead}{first} heard a song {at_place}. [It was very beautiful.|It was sweet and soft.]"
        ' "Who is singing?" {he} [thought|asked].',
        "{He} looked {spot1}. Nobody was there. {He} looked {spot2}, and there was {a_friend}.",
        '"[You sing so well|Your song is beautiful]," said {hero}. {Friend} was shy. "[I only sing'
        ' when I am alone|I am afraid to sing for others]," said {friend}.',
        '"We can sing together," said {hero}. "[Then you are not alone|Then it is easy]." They sang'
        " one song, and then one more.",
        "[Soon|After a while], everybody came to listen. They clapped [and clapped|their hands]."
        " {Friend} was not shy any more.",
    ),
    "cleaning": (
        '{lead}{hero_s} {parent} said, "[Your room is not clean|Please clean your room],'
        ' {hero_call}." But {hero} wanted to play.',
        '{He} put everything under the bed. "[Now it looks clean|Done]!" {he} said, and {he} went'
        " out to play.",
        "[That evening|Later], {he} could not find {his} {color} {toy}. {He} looked in the box."
        " {He} looked behind the door. It was not there.",
        "Then {he} looked under the bed. There was the {toy}, under all the other things!",
        '"[I will clean my room now|It is better to put things in their place]," said {hero}.'
        " {His} {parent} [smiled and helped {him}|helped {him}]. Soon the room was [very |]clean,"
        " and {he} knew where everything was.",
    ),
    "star": (
        "{lead}{first} sat on the hill with {his} friend {friend}. The sky was full of stars.",
        '[Suddenly|Then], a star fell from the sky. "[Quick|Look], make a wish!" said {friend}.',
        "{Hero} closed {his} eyes and thought [for a long time|about it]. {He} did not want a new"
        " {toy}. {He} did not want {a_food}.",
        '"[What did you wish for|What was your wish]?" asked {friend}. "I wish that we will always'
        ' be friends," said {hero}.',
        '{Friend} smiled. "[That was my wish too|Then we have the same wish]," {fhe} said. And the'
        " stars [were|seemed] very bright that night.",
    ),
    "garden helper": (
        "{lead}{first} helped {his} {parent} in the garden. They wanted to pull out a [very |]big"
        " carrot.",
        "{Hero} pulled and pulled, but the carrot did not come out. {His} {parent} pulled too, but"
        " the carrot did not move.",
        '{A_friend} came by. "[Let me help you|I can help]!" said {friend}. So they pulled, all'
        " three of them. One, two, three!",
        "[Pop!|Plop!] The carrot came out, and they all fell down on the grass. They laughed [and"
        " laughed|until they were tired].",
        'That evening, they ate [hot|warm] carrot soup together. [It was very good.|"Together we'
        ' are strong," said {hero}.]',
    ),
    "lost tooth": (
        "{lead}{first} met {a_friend} {at_place}. {Friend} did not say anything. {Fhe} held {fhis}"
        " hand in front of {fhis} mouth.",
        '"[What is wrong|Why do you not talk to me]?" asked {hero}. {Friend} was very quiet. Then'
        ' {fhe} said, "I lost a tooth. Now I look funny."',
        "{Hero} laughed, but not in a bad way. {He} opened {his} mouth. {He} had lost a tooth too!",
        '"[We look the same|Now we are the same]," said {hero}. "A new tooth will come[ soon|]."'
        " {Friend} smiled a [big|wide] smile.",
        "Then they went home and ate soft [cake|bread|bananas]. They laughed all [day|afternoon].",
    ),
}
LONG_PLOTS: Final[dict[str, tuple[str, ...]]] = {
    "lost toy": (
        "{lead}{first} took {his} {color} {toy} {to_place}."
        " [It was {his} favorite toy.|{He} loved that {toy} very much."
        "|{His} {parent} had given it to {him}.]",
        "{He} [ran and played|played and laughed|played there] [all morning|for a long time]."
        " [But when it was time to go home, the {toy} was gone!"
        "|Then {he} stopped to look at {sight}. When {he} turned around, the {toy} was gone!]",
        '["Oh no! Where is my {toy}?" cried {hero}.'
        '|{Hero} was very sad. "Where is my {toy}?" {he} said.'
        '|"My {toy}! Where is it?" said {hero}, and {he} began to cry.]',
        "{He} looked {spot1}, but it was not there."
        " {He} looked {spot2}, but it was not there[ either|].",
        "[Just then|Then|After a while], {a_friend} came by."
        ' "[Why are you sad|What is wrong|Why are you crying]?" asked {friend}.'
        ' "I lost my {toy}," said {hero}.'
        ' "[Do not worry|Do not be sad]. I will help you," said {friend}.',
        "[They looked and looked.|They looked everywhere.|They looked for it together.]"
        " [At last|Soon|In the end], {friend} saw something {color} {spot3}. It was the {toy}!",
        '{Hero} [was so happy|jumped for joy|laughed and clapped]. "Thank you, {call}!" {he} said.',
        "[From that day on|After that], {hero} and {friend} were [best|good] friends."
        "|{He} gave {friend} a big hug, and they played together until the sun went down."
        "|{He} held the {toy} tight and went home with a [big |]smile.",
    ),
    "found treasure": (
        "{lead}{first} went for a walk {at_place}. {He} looked at {sight}.",
        "[Suddenly|Then], {he} saw something {spot1}."
        " It was {a_treasure}! [It was very pretty.|{He} picked it up and looked at it.]",
        '["Who lost this {treasure}?" {he} thought.|"This is not my {treasure}," said {hero}.'
        ' "Somebody must miss it."|{Hero} wanted to keep it, but {he} knew that it was not {his}'
        " {treasure}.]",
        "So {he} [walked on|went down the path] and [soon |]met {a_friend}."
        ' {Friend} looked very sad. "Did you lose something?" asked {hero}.'
        ' "Yes," said {friend}. "I lost my {treasure}, and I cannot find it."',
        '"Is this your {treasure}?" asked {hero}, and {he} held it up.'
        ' "Yes, that is my {treasure}!" [cried|shouted] {friend}.'
        ' "Thank you[ so much|], {callback}!"',
        "[{Friend} was so happy that {fhe} gave {hero} {a_food}. They ate it together."
        "|{Friend} gave {hero} a big hug. Then they played together {at_place}."
        '|{Friend} smiled. "You are very kind," {fhe} said. "Will you be my friend?"'
        ' "Yes!" said {hero}.]',
        "{Hero} went home and told {his} {parent} [all about it|about {his} day]."
        " [{His} {parent} was very proud of {him}."
        '|"You did the right thing," said {his} {parent}.]',
    ),
    "new friend": (
        "{lead}{first} was [all |]alone {at_place}."
        " {He} [had nobody to play with|wanted to play, but there was nobody to play with]."
        " {He} [felt sad|felt lonely|sat down and was sad].",
        "[Then|Just then|After a while], {he} heard a [small|funny|soft] sound. [{He} turned"
        " around|{He} looked {spot1}] and saw {a_friend}.",
        '["Hello," said {hero}. "What is your name?"|"Hello! Who are you?" asked {hero}.]'
        ' "{my_name}," said {friend}. "[Do you want to play|Will you play] with me?"',
        '"Yes, [I would love to|let us play]!" said {hero}. So they played [with a {toy}'
        "|with {a_toy}|hide and seek|in the sun] [all day|all afternoon|until it was dark].",
        "[{Hero} shared {his} {food} with {friend}, and {friend} told {him} a funny story."
        "|They laughed and ran and looked at {sight}."
        "|When they were tired, they sat down {spot2} and ate {a_food}.]",
        'When it was time to go home, {hero} said, "[I had so much fun|This was a good day].'
        ' Can we play again tomorrow?" "Of course," said {friend}.',
        "[From that day on|After that day], {hero} was never [lonely|alone] again."
        "|And so they played together every day."
        "|{Hero} walked home and smiled. {He} had a new friend.",
    ),
    "rain": (
        "{lead}{first} was playing {at_place} with {his} {toy}."
        " The sun was warm and the sky was blue.",
        "[Then|Suddenly|But then] [big dark clouds came|the sky became dark], and it began to"
        " rain. [{Hero} got very wet.|The rain was cold.|The wind blew and blew.]",
        '"I must find a dry place," {he} [said|thought]. {He} ran and ran. [Soon|At last], {he}'
        " [saw a little house and knocked on the door|came to an old barn and looked inside"
        "|found a small cave and looked inside]. {A_friend} was [already |]there.",
        '"[Come in|Come here], come in!" said {friend}. "[It is warm and dry here'
        '|You are all wet|There is room for two]." "Thank you," said {hero}, and {he} sat down'
        " next to {friend}.",
        "[They ate {a_food} and listened to the rain.|{Friend} gave {him} a warm blanket and"
        " {a_food}.|They told each other stories while the rain fell outside.]",
        "[After a while|At last|Soon], the rain stopped. They went outside and saw a"
        ' [beautiful|big|bright] rainbow. "[Look|Oh, look]! How pretty!" said {hero}.',
        "{He} [thanked {friend} and ran home|said goodbye to {friend} and went home]."
        " {His} {parent} [was happy to see {him}|gave {him} a big hug]."
        "|They jumped in the puddles and laughed. {Hero} was happy that {he} had a new friend.",
    ),
    "sharing": (
        "{lead}{hero_s} {parent} gave {him} {a_food}. {He} took the {food} and went {to_place}.",
        "{He} sat down {spot1}. {He} was [very |]hungry, and the {food} [looked|smelled] so good.",
        "[Just then|Then], {a_friend} came [along|by]. {Friend} looked at the {food}."
        ' "I am so hungry," said {friend}. "I [did not eat|have not eaten] [all day|today]."',
        "{Hero} looked at the {food}. {He} wanted to eat it all."
        " [But {he} saw that {friend} was sad.|But {friend} looked so sad.]"
        " So {he} [broke|cut] it in two and gave one half to {friend}.",
        '"[Here, you|You] can have half of my {food}," {he} said.'
        ' "[Thank you|Oh, thank you], {callback}!" said {friend}. They ate the {food} together.'
        " It was [very good|sweet|the best {food} in the world].",
        '[Then {friend} said, "Now I want to give you something too." {Fhe} gave {hero}'
        " {a_treasure}.|Then they played with {a_toy} {at_place} until the sun went down.]",
        "{Hero} learned that it is [good|nice] to share."
        "|{Hero} was happy. Sharing made the {food} taste even better."
        "|{Hero} and {friend} became good friends, and they always shared their food.",
    ),
    "afraid of water": (
        "{lead}{first} went to the lake with {his} {parent}. It was hot, and everybody was"
        " swimming. But {hero} was afraid of the water.",
        '"[Come in, {hero_call}|Come and swim]!" said {his} {parent}.'
        ' "No, I am [afraid|scared]," said {hero}. {He} sat down [in the sand|in the grass|on a'
        " stone] and looked at the water.",
        "{A_friend} [sat down next to {him}|saw {him} and came near]."
        ' "I was afraid too," said {friend}. "[First, put one foot in the water.'
        '|Just take one small step.] I will [hold on to you|stay with you]."',
        "{Hero} [took a deep breath|closed {his} eyes|stood up]. {He} took one small step. Then"
        " {he} took one more. The water was [cool|warm] and soft.",
        '"[Look|Look at me]! I am in the water!" {he} [shouted|cried]. {He} splashed and laughed,'
        " and {friend} splashed too.",
        "[Soon|After a while], {he} could swim [a little|all by {himself}]. {His} {parent} was very"
        ' proud. "You were so brave," said {his} {parent}.',
        "[From that day on|After that], {hero} was not afraid of the water[ any more|]."
        '|{Hero} hugged {friend}. "Thank you for your help," {he} said.'
        "|{Hero} went to the lake every day that summer.",
    ),
    "dark night": (
        "{lead}{first} could not sleep. The room was dark, and {he} was [scared|afraid].",
        '[Then|Suddenly], {he} heard a [strange|funny|soft] sound. Tap, tap, tap! "[What was'
        ' that|Who is there]?" [said|whispered] {hero}. {He} hid under the blanket.',
        "Tap, tap, tap! There it was again. It came from the [window|door]."
        " {Hero} wanted to call {his} {parent}, but [first |]{he} wanted to be brave.",
        "[Slowly|Very slowly], {he} [got up|climbed out of bed] and looked outside. It was only"
        " {a_friend}! {Friend} was [cold|wet and cold|tired and hungry].",
        '"[I am sorry|Please do not be afraid]," said {friend}. "[I lost my way|I cannot find my'
        ' way home], and it is so [dark|cold] here." "Come in," said {hero}.',
        "{He} gave {friend} [{a_food} and |]a warm blanket. They looked at the [moon|stars] and"
        " [talked|told stories] [until they were tired|for a long time].",
        "Soon they were both asleep. {Hero} was not afraid of the dark any more."
        '|"The night is not so dark when you have a friend," said {hero}. Then {he} fell asleep.',
    ),
    "stuck in a tree": (
        "{lead}{first} was playing with {his} {color} {toy} {at_place}. {He} threw it up, up, up"
        " into the [sky|air].",
        "But the {toy} did not come down. It was stuck in a [tall|big] tree!"
        ' "Oh no! My {toy}!" [said|cried] {hero}.',
        "{He} jumped, but {he} could not reach it. {He} [shook the tree|threw a stick], but the"
        " {toy} did not [move|fall]. {He} tried to climb, but the tree was too tall.",
        '[Just then|Then], {a_friend} came by. "[Can I help you|What are you doing]?" asked'
        ' {friend}. "My {toy} is stuck in the tree," said {hero}.',
        '"[I have an idea|I know what to do]," said {friend}. "[You can stand on my back'
        "|Let me stand on your back|We can use this long stick|We can push the tree together]."
        ' [It will work|Let us try]." So they tried[ it|]. One, two, three! The {toy} fell down.',
        '"Hooray! [We did it|It worked]!" they shouted. {Hero} was very [happy|glad].'
        ' "Thank you, {call}. Do you want to play with me?" {he} asked.',
        "[They played with the {toy} all day.|So they played together until it was dark.]"
        " [But this time, they stayed away from the trees.|They had a lot of fun.]",
    ),
    "cake": (
        '{lead}{first} wanted to make a [cake|pie] for {his} {parent}. "It will be a surprise,"'
        " {he} [said|thought].",
        "{He} needed [milk and eggs|eggs and butter|apples and milk]. So {he} went to the"
        ' [market|farm] and met {a_friend}. "[What are you looking for|What do you need]?" asked'
        ' {friend}. "I want to make something good to eat," said {hero}.'
        ' "[I can help you|Let us make it together]," said {friend}.',
        "They went home and began to work. {Hero} mixed everything in a big [bowl|pot], and"
        " {friend} [washed the apples|found the sugar|helped {him}]. There was flour everywhere!",
        '[Soon|After a while], a sweet smell filled the house. "[Is it ready|Can we eat it now]?"'
        ' asked {friend}. "Not yet. We must wait," said {hero}.',
        'At last, {his} {parent} came home. "Surprise!" they shouted. "[What a lovely surprise!'
        '|Did you make this for me?]" said {his} {parent}.',
        "They all sat down and ate. It was [so good|sweet and warm|the best in the world].",
        "{His} {parent} gave them both a big hug.|{Hero} was proud, and {his} {parent} was very"
        ' happy.|"Working together is fun," said {hero}, and {friend} smiled.',
    ),
    "lost way": (
        "{lead}{first} [saw|followed] a [blue|yellow|white] butterfly {at_place}."
        ' [{He} ran after it.|"How pretty!" {he} said, and {he} ran after it.]',
        "{He} ran and ran. [Then the butterfly was gone.|Then the butterfly flew away.] {Hero}"
        " looked around. {He} did not know where {he} was.",
        '["I am lost," said {hero}, and {he} began to cry.|{Hero} was lost. {He} was afraid and'
        ' wanted to go home.|"Where is my home?" {he} thought. {He} sat down {spot1} and cried.]',
        '{A_friend} heard {him} and came near. "[Why are you crying|What is wrong|Are you lost]?"'
        ' asked {friend}. "I cannot find my way home," said {hero}.',
        '"[Do not cry|Do not be afraid]. I know the way," said {friend}. "[Come with me|Follow me]'
        '!" They walked [over a bridge|down a long path|past a big tree] and [up a hill|across a'
        " meadow|along the river].",
        "[At last|Soon], {hero} saw {his} home. {His} {parent} was waiting [at the door|outside]."
        ' "[There you are|I was so worried]!" said {his} {parent}, and hugged {him}.',
        '{Hero} turned around to thank {friend}. "[Come and see me again|You are a true friend],"'
        " {he} said."
        "|{Hero} thanked {friend}, and they all ate {a_food} together."
        "|{Hero} promised that {he} would never run so far away again.",
    ),
    "sick friend": (
        "{lead}{first} went to see {his} friend {friend}. {He} knocked on the door, but {friend}"
        " did not come out to play.",
        '"[I am sick|I do not feel well]," said {friend}. "I must stay in bed[ today|]."'
        " [{Fhe} looked very tired.|{Fhe} was sad.]",
        '{Hero} wanted to help {fhim}. "[What can I do|How can I help]?" {he} thought.'
        " [Then {he} had an idea.|{He} had a good idea.]",
        "{He} went {to_place} and picked [some flowers|a red flower|yellow flowers]. Then {he} went"
        " home and made [hot soup|warm soup|a pot of tea] with {his} {parent}.",
        '{He} [took|brought] everything to {friend}. "[This is for you|Look what I have for you],"'
        ' {he} said. {Friend} [smiled|sat up in bed]. "[Thank you, {callback}|You are so kind]!"'
        " {fhe} said.",
        "{Hero} sat next to the bed and [told {fhim} a story|sang a song|read {fhim} a book]."
        " [Soon|After a while], {friend} [fell asleep|felt a little better].",
        "The next day, {friend} was well again. They went {to_place} and played with {a_toy}.",
        '"[You are the best friend in the world|A good friend is the best medicine]," said'
        " {friend}.|{Hero} was happy that {his} friend could laugh again.",
    ),
    "hide and seek": (
        "{lead}{first} and {his} friend {friend} were playing hide and seek {at_place}.",
        '"You hide, and I will count," said {hero}. {He} closed {his} eyes and counted. "One, two,'
        ' three, four, five! [Here I come|I am coming]!"',
        "{He} looked {spot1}. {Friend} was not there. {He} looked {spot2}. {Friend} was not there"
        ' [either|]. "[Where are you|Where can {fhe} be]?" said {hero}.',
        "[Then|Suddenly], {he} heard a [small|tiny|funny] sound. Achoo! [Somebody had to sneeze."
        "|What was that?] {He} looked {spot3}, and there was {friend}!",
        '"I found you!" [shouted|cried] {hero}. {Friend} laughed and laughed. "[I had to sneeze'
        '|You are very good at this game]," {fhe} said. "Now it is my turn to count."',
        "[They played|So they played] [again and again|all afternoon] until {hero_s} {parent}"
        " called them. {His} {parent} had {a_food} for them.",
        'They ate it and [laughed|smiled]. It was so much fun.|"Tomorrow we will play again,"'
        " said {hero}, and {friend} [nodded|agreed].",
    ),
    "seed": (
        '{lead}{first} found a [tiny|small|little] seed {spot1}. "What will it be?" {he} [said'
        "|asked|thought].",
        "{He} took the seed home and put it in the ground. Every day, {he} gave it water. But"
        " nothing happened. [{Hero} was sad.|{Hero} waited and waited.]",
        '"[Why does it not grow?|It does not grow,]" {he} said to {his} {parent}.'
        ' "[You must wait|Good things take time]," said {his} {parent}.'
        ' "[A seed needs sun and water and time|It is sleeping under the ground]."',
        "So {hero} waited. [Then, one morning|One day], {he} saw something green. It was a tiny"
        ' leaf! "[Look|Come and see]! It is growing!" {he} shouted.',
        "The plant grew and grew. [Soon|After some weeks], it was as tall as {hero}. Then a"
        " [big|beautiful] {color} flower opened in the sun.",
        '{A_friend} came to see it. "[It is so pretty|What a beautiful flower]!" said {friend}.'
        ' "[How did you do it|Did you grow it]?" "I gave it water, and I waited," said {hero}.',
        '{Hero} gave {friend} a seed of the flower. [Now they both had a garden.|"Now you can grow'
        ' one too," {he} said.]'
        "|{Hero} was very proud. {He} had learned to wait.",
    ),
    "broken cup": (
        '{lead}{first} was playing with {his} {toy} in the house. "[Do not play in here'
        '|Please play outside]," said {his} {parent}. But {hero} did not listen.',
        "[Crash!|Bang!] The {toy} hit the table, and {a_color} cup fell down and broke."
        " It was {his} {parent}'s favorite cup.",
        "{Hero} was [afraid|scared]. {He} [hid the pieces|put the pieces under the bed] and ran"
        " outside. But {he} did not feel good[ at all|].",
        '{A_friend} saw {him}. "[Why are you sad|What is wrong]?" asked {friend}. {Hero} told'
        ' {fhim} about the cup. "You should tell the truth," said {friend}.'
        ' "[It is always best|Then you will feel better]."',
        'So {hero} went [back |]home. "I broke your cup," {he} said. "I am [so |very |]sorry."',
        '{His} {parent} [looked at {him} and smiled|was quiet for a while]. "[Thank you for telling'
        ' me|I am glad that you told me the truth]," said {his} {parent}. "[It was only a cup'
        '|We can fix it together]."',
        "{Hero} gave {his} {parent} a big hug. {He} felt [much |]better."
        "|{Hero} learned that it is good to tell the truth.",
    ),
    "birthday": (
        "[Today|It] was {hero_s} birthday, and {he} was very happy. {He} waited for {his} friends."
        "|{lead}{first} woke up early. It was {his} birthday!",
        "But [nobody came|nobody said anything]. {His} {parent} was not at home. {His} friend"
        ' {friend} was not there. "[Did they forget my birthday|Where is everybody]?" {he}'
        " [thought|said].",
        "{Hero} was sad. {He} went {to_place} and sat down {spot1}. {He} looked at {sight}.",
        "[Then|Suddenly], {he} heard a song. {He} turned around. There was {friend}, and there was"
        ' {his} {parent}, with a big cake! "Happy birthday!" they [shouted|sang].',
        '"[We did not forget you|It was a surprise for you]," said {friend}, and gave {him} a'
        " [big |small |]box. {Hero} opened it. It was {a_toy}!",
        '"Thank you! I always wanted {a_toy_plain}!" said {hero}. They ate the cake and played with'
        " the {toy} [all day|until the sun went down].",
        "It was the best birthday of {his} life.|{Hero} knew that {his} friends would never forget"
        " {him}.",
    ),
    "race": (
        '{lead}{first} met {a_friend} {at_place}. "I am [very |]fast," said {friend}. "I can run'
        ' faster than you!" "Let us have a race," said {hero}.',
        'They wanted to run [to the big tree|to the old bridge|to the gate]. "One, two, three,'
        ' go!" they shouted. {Friend} ran very fast, and soon {fhe} was far ahead.',
        '{Hero} ran as fast as {he} could. [But {friend} was faster.|"I will not stop," {he}'
        ' thought.] [Then|Suddenly], {friend} fell over a stone. "Ouch! My [leg|foot]!" {fhe}'
        " cried.",
        '{Hero} could win the race now. But {he} stopped. "Are you hurt?" {he} asked. "[Yes, a'
        ' little|It hurts a little]," said {friend}.',
        "{Hero} helped {fhim} to stand up. [They walked|Then they walked] to the end together,"
        " [step by step|side by side].",
        '"You could win, but you stopped to help me," said {friend}. "[You are a good friend'
        '|You are the real winner]."',
        '{Hero} smiled. "[A friend is better than a race|We both won]," {he} said.'
        "|After that, they raced every day, and it did not matter who was first.",
    ),
    "snow": (
        '{lead}{first} looked out of the window. Everything was white. "It is snowing!"'
        " {he} [shouted|cried].",
        "{He} put on {his} {color} [scarf|hat|coat] and ran outside. The snow was [soft and cold"
        "|cold and deep].",
        '{A_friend} was [already there|outside too]. "[Let us make a snowman|Do you want to make a'
        ' snowman]!" said {friend}. "[Yes, let us do it|What a good idea]!" said {hero}.',
        "They made a big ball and a small ball. {Hero} found [a carrot for the nose|two stones for"
        " the eyes], and {friend} found [an old hat|two long sticks for the arms].",
        '"He looks [funny|nice|happy]," said {friend}. "But he is cold," said {hero}. So {he} gave'
        " the snowman {his} {color} scarf.",
        "Then they went inside, and {his} {parent} gave them [hot milk|warm soup|hot tea] and"
        " {a_food}. They sat by the fire and [looked at the snow|told stories].",
        'Outside, the snowman [smiled|seemed to smile] at them.|"I love the snow," said {hero}.'
        ' "[Me too|I love it too]," said {friend}.',
    ),
    "little bird": (
        "{lead}{first} was walking {at_place}. [Suddenly|Then], {he} heard a sad little song.",
        "{Hero} looked {spot1} and saw a tiny bird. It had fallen out of its nest."
        ' "[Poor little bird|You poor little thing]," said {hero}. "I will help you."',
        "[{He} looked up and saw the nest in a tree.|The nest was high up in a tree.] But {hero}"
        " could not climb so high.",
        'So {he} went to find {his} friend {friend}. "[Can you help me?|I need your help,]" said'
        ' {hero}. "A little bird fell out of its nest." "[Of course|Yes, I will help you]," said'
        " {friend}.",
        "{Friend} [held the tree|stood under the tree], and {hero} climbed up on {fhis} back."
        " [Very slowly|Slowly and softly], {he} put the bird back into the nest.",
        'The mother bird came and sang a happy song. "[Thank you, thank you|I think she wants to'
        ' thank us]," [she sang|said {hero}].',
        "[Every morning after that|From that day on], the little bird sang for {hero} and {friend}."
        "|{Hero} and {friend} walked home. They were very happy that they had helped.",
    ),
}
